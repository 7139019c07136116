"""MODEL: from what the user typed to a folder with a ``config.json``. No weights, no code unless asked for."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import socket
import urllib.parse
from pathlib import Path
from typing import Any

from autofit.system import strict_json
from autofit.system.errors import ModelError
from autofit.system.files import writing

DEMO = "demo"
MAX_CONFIG_BYTES = 4 << 20
_LAYERS = {f"{what}_layers" for what in ("num_hidden", "num", "n", "encoder", "decoder", "num_decoder")} | {"n_layer"}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)


def fetch(name: str, into: Path, *, trust_remote_code: bool = False) -> Path:
    """Bring the model's ``config.json``, and its code where that is trusted, into a folder.

    Args:
        name: ``demo``, a folder or file, or a hub id. What exists as a path is a path.
        into: Folder that is made; it is left out of account what was in it before.
        trust_remote_code: Bring ``*.py`` files beside the config too.

    Returns:
        ``into``.

    Raises:
        ModelError: There is no such model, or its config can't be read.
    """
    source = _source(name, trust_remote_code=trust_remote_code)
    config = read_config(source / "config.json" if source.is_dir() else source, name)
    if config.get("auto_map") and not trust_remote_code:
        _refuse_code(config, name)
    with writing(into):
        into.mkdir(parents=True, exist_ok=True)
        (into / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        if trust_remote_code:
            folder = source if source.is_dir() else source.parent
            for code in folder.glob("*.py"):
                shutil.copyfile(code, into / code.name)
    return into


def local_config(name: str) -> Path | None:
    """The config that a name means on this machine, of a folder or a file; ``None`` for a hub id."""
    if name == DEMO:
        return Path(__file__).with_name("demo.json")
    with contextlib.suppress(OSError, RuntimeError, ValueError):  # as :func:`_source` says
        path = Path(name).expanduser()
        path = path / "config.json" if path.is_dir() else path
        return path if path.is_file() else None
    return None


def _source(name: str, *, trust_remote_code: bool) -> Path:
    if name == DEMO:
        return Path(__file__).with_name("demo.json")
    if not name.strip() or "\0" in name:
        raise ModelError(f"MODEL {name!r} is no model", hint=_WANTED)
    try:
        path = Path(name).expanduser()
        if path.is_dir():
            if not (path / "config.json").is_file():
                raise ModelError(f"folder {name!r} holds no config.json", hint=_WANTED)
            return path
        if path.is_file():
            if path.suffix == ".py":
                raise ModelError(f"MODEL {name!r} is a Python file, and autofit reads a config.json", hint=_WANTED)
            return path
    except (OSError, RuntimeError, ValueError) as error:  # too long for a path, no such home, half a letter
        if not _HUB_ID.fullmatch(name):
            why = getattr(error, "strerror", None) or error  # the error itself holds the whole name again
            raise ModelError(f"MODEL {name[:200]!r} can't be a path: {why}", hint=_WANTED) from error
    if not _HUB_ID.fullmatch(name) or ".." in name:
        raise ModelError(f"no file or folder {name[:200]!r}, and it can't be a hub id", hint=_WANTED)
    return _from_hub(name, trust_remote_code=trust_remote_code)


_WANTED = "give a hub id like Qwen/Qwen2.5-0.5B, a folder or file with a config.json, or demo"


def _from_hub(name: str, *, trust_remote_code: bool) -> Path:
    from huggingface_hub import constants, errors, hf_hub_download, snapshot_download

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    # the library tries five times in half a minute; a hub that can't be reached is asked of the cache alone
    local = constants.HF_HUB_OFFLINE or not _reachable(constants.ENDPOINT)
    try:
        if not local:
            length = hf_hub_download(name, "config.json", dry_run=True).file_size or 0
            if length > MAX_CONFIG_BYTES:
                raise _too_large(f"the hub's config.json of {name!r}", length)
        if trust_remote_code:
            return Path(snapshot_download(name, allow_patterns=["config.json", "*.py"], local_files_only=local))
        return Path(hf_hub_download(name, "config.json", local_files_only=local))
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{name} is gated on the hub", hint="accept its terms there and log in with `hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(f"the hub has no model {name!r}, or none that you may see", hint=_WANTED) from error
    except errors.EntryNotFoundError as error:
        if isinstance(error, errors.LocalEntryNotFoundError):
            status = getattr(getattr(error.__cause__, "response", None), "status_code", None)
            why = "the hub can't be reached" if status is None else f"the hub answers with status {status}"
            if constants.HF_HUB_OFFLINE:
                why = "HF_HUB_OFFLINE is set"
            raise ModelError(
                f"{name!r} is no file or folder here, and {why}",
                hint="give a folder or file with a config.json, or try again with a connection",
            ) from error
        raise ModelError(f"the hub's {name!r} has no config.json", hint="autofit needs a transformers model") from error
    except (OSError, ValueError, errors.HfHubHTTPError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"the config of {name!r} can't be had from the hub: {first}", hint=_WANTED) from error


def _reachable(endpoint: str, timeout_seconds: float = 5.0) -> bool:
    """Whether a connection to the hub can be made; with a proxy that is the proxy's business."""
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    url = urllib.parse.urlsplit(endpoint)
    try:
        port = url.port or (80 if url.scheme == "http" else 443)
        with socket.create_connection((url.hostname or "", port), timeout_seconds):
            return True
    except (OSError, ValueError):
        return False


_SHOWN = 40
"""Letters of a file that is no config, so that a message shows what it is."""


def _too_large(what: str, length: int) -> ModelError:
    return ModelError(f"{what} has {length} bytes; a config.json has a few thousand", hint="is it the right file?")


def read_config(path: Path, name: str) -> dict[str, Any]:
    """The config as an object.

    Raises:
        ModelError: It is too large, no JSON, no object, holds NaN, or does not say what model it is.
    """
    try:
        length = path.stat().st_size
        if length > MAX_CONFIG_BYTES:
            raise _too_large(str(path), length)
        if length == 0:
            raise ModelError(f"{path} is empty", hint="fetch the model's config.json again")
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} can't be read: {error}", hint=_WANTED) from error
    try:
        config = strict_json.loads(text, _infinity)
    except ValueError as error:
        hint = "fetch the model's config.json again" if path.suffix == ".json" else _WANTED
        raise ModelError(f"{path} is not valid JSON: {error}", hint=hint) from error
    if not isinstance(config, dict):
        got = text.strip()
        got = got if len(got) <= _SHOWN else f"{got[:_SHOWN]}..."
        raise ModelError(f"{path} holds {got}, and a JSON object is wanted", hint=_WANTED)
    if not isinstance(config.get("model_type"), str) or not config["model_type"]:
        raise ModelError(
            f"{path} has no model_type, so {name!r} is not a transformers model",
            hint="autofit trains models that transformers can build from their config.json",
        )
    named = config.get("architectures")
    if named is not None and not (isinstance(named, list) and all(isinstance(one, str) for one in named)):
        raise ModelError(
            f"{path}: architectures is {json.dumps(named)[:40]}, not a list of names",
            hint='as transformers writes it: "architectures": ["LlamaForCausalLM"]; or leave it out',
        )
    _check_sizes(config, str(path))
    return config


def _infinity(text: str) -> Any:
    """Infinity as transformers 5 writes it; its version 4 wrote the bare word, as in configs of Mamba 2 and Bamba."""
    return strict_json.no_constant(text) if text == "NaN" else {"__float__": text}


def _check_sizes(config: dict[str, Any], where: str) -> None:
    """Refuse fewer layers than 0 and tokens than 1, of which transformers builds a model and says nothing."""
    for name, value in config.items():
        if isinstance(value, dict):
            _check_sizes(value, f"{where}: {name}")
        elif name in _LAYERS and isinstance(value, int) and value < 0:
            raise ModelError(
                f"{where}: {name} is {value}", hint="a model has no fewer layers than 0: is it the right file?"
            )
        elif name == "vocab_size" and value == 0:
            raise ModelError(f"{where}: {name} is 0", hint="a model knows 1 token at least: is it the right file?")


def _refuse_code(config: dict[str, Any], name: str) -> None:
    """Refuse a model that only its own code can build; transformers' own classes need none."""
    if not _known(config["model_type"]):
        raise ModelError(
            f"{name!r} brings code of its own (auto_map), and nothing but that code can build it",
            hint="read that code, and pass --trust-remote-code if you want it to run here",
        )


def own_code(folder: Path, *, trusted: bool) -> str | None:
    """What becomes of the code that a model brings along, in words; ``None`` where it brings none."""
    named = read_config(folder / "config.json", str(folder)).get("auto_map")
    if not named:
        return None
    if not trusted:
        return "the model brings code of its own (auto_map), which is not used: transformers knows its architecture"
    prints = [
        f"{path.name} (sha256 {hashlib.sha256(path.read_bytes()).hexdigest()[:12]})"
        for path in sorted(folder.glob("*.py"))
    ]
    values = [str(value) for value in (named.values() if isinstance(named, dict) else [named])]
    elsewhere = sorted({value.partition("--")[0] for value in values if "--" in value})
    return (
        f"--trust-remote-code: the model's own code runs here: {', '.join(prints) or 'no file beside the config'}"
        + (f"; and code that is fetched from {', '.join(elsewhere)}" if elsewhere else "")
    )


def _known(model_type: str) -> bool:
    """Whether transformers has the model type, told from its folders, without importing it."""
    from importlib.util import find_spec

    spec = find_spec("transformers")
    if spec is None or spec.origin is None or not re.fullmatch(r"[\w-]{1,100}", model_type):
        return False
    folder = Path(spec.origin).parent / "models" / model_type.replace("-", "_")
    return folder.is_dir()


def stored_quantized(folder: Path) -> str | None:
    """That the model's weights are stored quantized, in words; ``None`` where they are not."""
    stored = read_config(folder / "config.json", str(folder)).get("quantization_config")
    if not isinstance(stored, dict):
        return None
    how = stored.get("quant_method", "quantization_config")
    return (
        f"the model's weights are stored quantized ({how}), and plans are for weights that are not: train the model "
        "that it was made of, or load its weights dequantized"
    )


def config_words(folder: Path, *, trusted: bool) -> list[str]:
    """What is to be known of a model by its config alone, a sentence each."""
    return [words for words in (own_code(folder, trusted=trusted), stored_quantized(folder)) if words is not None]


def modeling_module(config: Path) -> tuple[str, ...]:
    """Name of the module that holds the model's classes, to be loaded before the first trial."""
    model_type = str(read_config(config / "config.json", "")["model_type"]).replace("-", "_")
    known = _known(model_type)
    return (f"transformers.models.{model_type}.modeling_{model_type}",) if known else ()
