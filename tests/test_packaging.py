"""The wheel: its files, its top-level names, and that the installed command runs."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Build the wheel without network, from a copy, because setuptools leaves a build folder in the source."""
    work = tmp_path_factory.mktemp("wheel")
    source = work / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "specctl", "data_prep", "recipes"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(source)], check=True)
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(work),
        str(source),
    ]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return next(work.glob("*.whl"))


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory) -> Path:
    """Install the wheel where nothing else of the checkout is visible."""
    folder = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(folder), str(wheel)]
    subprocess.run(pip, check=True, capture_output=True)
    return folder


def installed(site: Path, cwd: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run the installed command outside the checkout; dependencies come from the test environment."""
    script = site / "bin" / "specctl"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SPECCTL_")}
    environment["PYTHONPATH"] = str(site)
    return subprocess.run([sys.executable, script, *argv], cwd=cwd, env=environment, capture_output=True, text=True)


def test_only_specctl_is_a_top_level_name(wheel):
    """`data_prep` and `recipes` as top-level packages would collide with other packages."""
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"specctl"}


def test_the_wheel_holds_every_file(wheel):
    """A package missing from pyproject's list would work in the checkout only."""
    held = set(zipfile.ZipFile(wheel).namelist())
    wanted = set()
    for folder, prefix in (("specctl", "specctl"), ("data_prep", "specctl/data_prep"), ("recipes", "specctl/recipes")):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                wanted.add(f"{prefix}/{path.relative_to(ROOT / folder).as_posix()}")
    assert wanted <= held, sorted(wanted - held)


def test_the_installed_command_runs(site, tmp_path):
    shown = installed(site, tmp_path, "--help")
    assert shown.returncode == 0, shown.stderr
    assert "train-drafter" in shown.stdout
    recipes = installed(site, tmp_path, "recipes", "ls", "-q")
    assert "demo/train" in recipes.stdout.split()
    # one prompt of every domain, because phrases are files beside the modules
    code = (
        "import specctl, specctl.data_prep as d; print(specctl.__file__, d.__file__)\n"
        "assert all(next(domain.generate(1, seed=0)) for domain in d.DOMAINS.values())"
    )
    where = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert where.stdout.count(str(site)) == 2, "the checkout was tested, not the wheel"


@pytest.mark.slow
def test_doctor_finds_the_installed_package_complete(site, tmp_path):
    done = installed(site, tmp_path, "doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "builtin" in done.stdout
