"""Upload of an exported directory to the Hugging Face hub."""

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

from specctl.commands.export_result import RECORD
from specctl.errors import SpecctlError, one_line

TOKEN_HINT = "run `hf auth login`, or set HF_TOKEN to a token that may write"


def push(directory: Path, name: str, private: bool) -> str:
    """Upload a directory into a model repository, which is created if it is missing. Returns its address.

    export.json stays here: it holds paths of this machine. The token comes from `hf auth login` or `HF_TOKEN`.

    Raises SpecctlError if the hub cannot be reached or refuses; the directory remains.
    """
    api = HfApi()
    remains = f"the files remain in {directory}"
    try:
        url = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=name, folder_path=directory, ignore_patterns=[RECORD], commit_message="Upload by specctl export"
        )
    except LocalTokenNotFoundError as error:
        raise SpecctlError(f"no token of the hub; {remains}", TOKEN_HINT) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        reason = str(error.server_message or one_line(error)).replace("\n", " ")
        hint = TOKEN_HINT if status in (401, 403) else f"hf upload {name} {directory} tries again"
        raise SpecctlError(f"{api.endpoint} answered {status}: {reason:.200}; {remains}", hint) from error
    except Exception as error:  # the hub's client raises errors of httpx or httpx2, by its version
        hint = f"run `hf upload {name} {directory}` on a machine that reaches the hub"
        raise SpecctlError(f"the upload to {api.endpoint} failed: {one_line(error)}; {remains}", hint) from error
    return str(url)
