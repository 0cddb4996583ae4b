"""``run --push-to-hub``: model and card to the hub once they are saved, so that no failed upload loses them."""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path
from typing import Any

from isobn_finetune.errors import ConfigError, IsobnError

logger = logging.getLogger(__name__)

_REPO_ID = re.compile(r"[A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*", re.ASCII)
_WAITS = (1.0, 3.0, 9.0)
"""Seconds between the tries of an upload that failed for a reason that may pass."""


def check_upload(repo_id: str) -> None:
    """Finds out before training what would make the upload fail for certain.

    Args:
        repo_id: ``ORG/NAME``.

    Raises:
        ConfigError: It is no name of a repository, there is no valid token, or the hub is switched off.
    """
    if _REPO_ID.fullmatch(repo_id) is None or ".." in repo_id or "--" in repo_id or len(repo_id) > 96:
        raise ConfigError(
            f"--push-to-hub {repo_id}: not the name of a repository; write ORG/NAME, such as me/rte-isobn"
        )
    from huggingface_hub import HfApi, constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise ConfigError(f"--push-to-hub {repo_id}: HF_HUB_OFFLINE allows no upload. Unset HF_HUB_OFFLINE")
    if get_token() is None:
        raise ConfigError(
            f"--push-to-hub {repo_id}: not logged in to {constants.ENDPOINT}. Set HF_TOKEN, or 'hf auth login'"
        )
    try:
        HfApi().whoami()
    except Exception as error:
        if _status(error) in (401, 403):
            raise ConfigError(
                f"--push-to-hub {repo_id}: {constants.ENDPOINT} refuses the token. Check HF_TOKEN"
            ) from None
        logger.warning(
            "%s does not answer now (%s); the upload is tried after training.", constants.ENDPOINT, _reason(error)
        )


def upload_model(model_dir: Path, repo_id: str) -> str:
    """Uploads a model's folder, a few times where the reason for a failure may pass.

    Args:
        model_dir: Model, tokenizer and card; only read.
        repo_id: ``ORG/NAME``, made if it is not there.

    Returns:
        The address of the repository.

    Raises:
        IsobnError: It was not uploaded; says that the model is saved.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    for wait in (*_WAITS, None):
        try:
            url = api.create_repo(repo_id, repo_type="model", exist_ok=True)
            api.upload_folder(repo_id=repo_id, folder_path=model_dir, commit_message="Add model and card")
            return str(url)
        except Exception as error:  # the client raises its HTTP library's errors too, and changes that library
            if wait is None or not _may_pass(error):
                raise IsobnError(
                    f"--push-to-hub {repo_id}: not uploaded ({_reason(error)}). The model is saved in {model_dir}; the "
                    "same command with --resume uploads it without training again"
                ) from error
            logger.warning("The upload did not succeed (%s); trying again.", _reason(error))
            time.sleep(wait)
    raise AssertionError("the last try returns or raises")


def _status(error: BaseException) -> Any:
    seen: BaseException | None = error
    while seen is not None:
        status = getattr(getattr(seen, "response", None), "status_code", None)
        if status is not None:
            return status
        seen = seen.__cause__ or seen.__context__
    return None


def _may_pass(error: BaseException) -> bool:
    status = _status(error)
    if status is None:
        return not isinstance(error, ValueError | TypeError | KeyError)
    return status in (408, 409, 412, 429) or status >= 500


def _reason(error: BaseException) -> str:
    status = _status(error)
    return f"status {status}" if status is not None else type(error).__name__
