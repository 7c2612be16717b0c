"""Files named by others: anything but a regular file is refused by name, without waiting."""

import os
import socket

import pytest

from specctl import regular_files


@pytest.fixture(params=["pipe", "socket", "device", "directory", "dangling", "circle"])
def strange(request, tmp_path, pipe):
    """Return (a path that is not a regular file, part of the error message)."""
    path = tmp_path / "there"
    if request.param == "pipe":
        return pipe(path), "a named pipe, not a regular file"
    if request.param == "socket":
        with socket.socket(socket.AF_UNIX) as place:
            place.bind(os.path.relpath(path))
        return path, "a socket, not a regular file"
    if request.param == "directory":
        path.mkdir()
        return path, "Is a directory"
    leads = {"device": "/dev/zero", "dangling": tmp_path / "nowhere", "circle": path}
    path.symlink_to(leads[request.param])
    words = {"device": "a device, not a regular file", "dangling": "No such file", "circle": "symbolic links"}
    return path, words[request.param]


READERS = {
    "check": regular_files.check,
    "content": regular_files.read_bytes,
    "text": regular_files.read_text,
    "document": regular_files.read_json,
    "opened": regular_files.open_regular,
    "changed": lambda path: regular_files.open_regular(path, "rb+"),
}


@pytest.mark.parametrize("read", READERS)
def test_other_kinds_of_files_are_refused_by_name(strange, read):
    path, words = strange
    with pytest.raises(OSError, match=words) as caught:
        READERS[read](path)
    assert caught.value.filename == str(path)


def test_a_fault_is_put_into_words(strange, tmp_path):
    """A directory, a pipe or a device used to be called missing."""
    path, words = strange
    said = regular_files.fault(path)
    assert (said == "does not exist") if "No such file" in words else words in said
    assert regular_files.fault(tmp_path / "nowhere") == "does not exist"


def test_a_fault_of_a_directory_is_put_into_words(tmp_path, pipe):
    """A pipe or a device in the place of a model's directory used to be called missing."""
    (tmp_path / "file").touch()
    (tmp_path / "circle").symlink_to("circle")
    pipe(tmp_path / "pipe")
    faults = {
        tmp_path / "file": "is a file, not a directory",
        tmp_path / "circle": "cannot be read: Too many levels of symbolic links",
        tmp_path / "pipe": "is a named pipe, not a directory",
        "/dev/zero": "is a device, not a directory",
        tmp_path / "nowhere": "does not exist",
    }
    assert {path: regular_files.directory_fault(path) for path in faults} == faults


def test_a_pipe_is_not_appended_to(tmp_path, pipe):
    with pytest.raises(OSError, match="a named pipe"):
        regular_files.open_regular(pipe(tmp_path / "pipe"), "a")


def test_a_link_is_followed_unless_forbidden(tmp_path):
    (tmp_path / "file").write_text("1")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert regular_files.read_json(tmp_path / "link") == 1
    for mode in ("rb", "ab", "w"):
        with pytest.raises(OSError, match="a symbolic link, not a regular file"):
            regular_files.open_regular(tmp_path / "link", mode, follow=False)
    (tmp_path / "open").symlink_to(tmp_path / "new")
    with pytest.raises(OSError, match="a symbolic link"):
        regular_files.open_regular(tmp_path / "open", "a", follow=False)
    assert (tmp_path / "file").read_text() == "1" and not (tmp_path / "new").exists()


def test_a_new_file_replaces_a_link(tmp_path):
    (tmp_path / "file").write_text("1")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with regular_files.create_file(tmp_path / "link", "x", permissions=0o600) as file:
        file.write("2")
    assert (tmp_path / "file").read_text() == "1" and (tmp_path / "link").read_text() == "2"
    assert (tmp_path / "link").stat().st_mode & 0o777 == 0o600 and not (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("text", ["[" * 100_000, "1" * 5000, "{", ""], ids=["deep", "long", "half", "empty"])
def test_invalid_json_is_a_value_error(tmp_path, text):
    (tmp_path / "file").write_text(text)
    with pytest.raises(ValueError):
        regular_files.read_json(tmp_path / "file")


def test_a_file_over_the_size_limit_is_not_read(tmp_path):
    path = tmp_path / "sparse"
    with open(path, "wb") as file:
        file.truncate(2**40)
    with pytest.raises(OSError, match="larger than the limit of 1,000 bytes"):
        regular_files.read_bytes(path, 1000)
