"""Say what `from_pretrained(..., trust_remote_code=True)` of other stacks lacks in an exported folder.

    what opens it           reads
    AutoConfig, AutoModel   config.json: auto_map, which names classes; the .py that hold them, and those
                            that these import from beside themselves
    AutoProcessor           preprocessor_config.json, its auto_map, the .py
    AutoTokenizer           tokenizer.json; tokenizer_config.json, which is written where none is carried over

The .py are read as text and never run. One that `auto_map` takes from a hub (OWNER/NAME--module.Class) is not
looked for.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from asyncrl.policies.openvla.config import OpenVLAOFTConfig
from asyncrl.policies.openvla.tokenizer import BEGIN, END, UNKNOWN, PromptTokenizer
from asyncrl.storage.atomic import read_json, write_json
from asyncrl.storage.regular_files import read_text

TOKENIZER_CONFIG: Final = "tokenizer_config.json"
_PAD: Final = "<PAD>"
_MODEL: Final = "AutoConfig and AutoModel"
_PROCESSOR: Final = "AutoProcessor"
_MODEL_CODE: Final = ("configuration_prismatic.py", "modeling_prismatic.py")
_PROCESSOR_CODE: Final = ("processing_prismatic.py",)
"""As OpenVLA's folders call them, where no file says it."""
_OTHERS: Final = ("AutoProcessor", "AutoImageProcessor", "AutoFeatureExtractor", "AutoTokenizer")
_PROCESSOR_FILES: Final = ("preprocessor_config.json", "processor_config.json")
_CLASS: Final = re.compile(r"([A-Za-z_]\w*)\.[A-Za-z_]\w*")


@dataclass(frozen=True, kw_only=True)
class MissingFile:
    """A file that another stack needs and an exported folder does not have."""

    name: str
    """As in the original; behind it what is wrong with it, or what it must say."""
    needed_by: str
    """Classes of transformers that read it."""


def missing_files(folder: Path) -> list[MissingFile]:
    """List what other stacks do not find in a folder of the published layout; nothing is run.

    Raises:
        CheckpointError: a JSON file of the folder is broken.
    """
    return [*_of_model(folder), *_of_processor(folder)]


def by_reader(missing: list[MissingFile]) -> str:
    """Write them on a line: ``a.py, b.json (for AutoProcessor)``."""
    readers = dict.fromkeys(one.needed_by for one in missing)
    return "; ".join(
        f"{', '.join(one.name for one in missing if one.needed_by == reader)} (for {reader})"
        for reader in readers
    )


def model_class(folder: Path) -> str:
    """Return the class of transformers that opens the policy: the first AutoModel of its auto_map."""
    classes = _auto_map(read_json(folder / "config.json"))
    return next((name for name in classes if name.startswith("AutoModel") and name.isidentifier()), "")


def unpublished_size(config: OpenVLAOFTConfig) -> str:
    """Say why no other stack can build a policy of this size; empty: it is that of the published 7B model."""
    full = OpenVLAOFTConfig.full()
    same = all(getattr(config, name) == getattr(full, name) for name in ("dino", "siglip", "patch_size"))
    if same and config.image_size == full.image_size:
        return ""
    return (
        f"vision towers of {config.dino.width} and {config.siglip.width} channels at {config.image_size} "
        "pixels: OpenVLA's code builds its towers by the names of timm's models, and timm has none of this "
        "size"
    )


def write_tokenizer_config(folder: Path, tokenizer: PromptTokenizer) -> None:
    """Write what `AutoTokenizer` asks for besides `tokenizer.json`, unless the original gave it."""
    if (folder / TOKENIZER_CONFIG).exists():
        return
    kinds = {"bos_token": BEGIN, "eos_token": END, "unk_token": UNKNOWN, "pad_token": _PAD}
    known = {kind: text for kind, text in kinds.items() if tokenizer.tokenizer.token_to_id(text) is not None}
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **known}
    write_json(folder / TOKENIZER_CONFIG, fields)


def _of_model(folder: Path) -> Iterator[MissingFile]:
    classes = _auto_map(read_json(folder / "config.json"))
    if "AutoConfig" not in classes or not any(name.startswith("AutoModel") for name in classes):
        yield MissingFile(name="config.json with auto_map", needed_by=_MODEL)
        names = [name for name in _MODEL_CODE if not (folder / name).is_file()]
    else:
        of_model = {name: of for name, of in classes.items() if not name.startswith(_OTHERS)}
        names = list(_lacking(folder, of_model))
    yield from (MissingFile(name=name, needed_by=_MODEL) for name in names)


def _of_processor(folder: Path) -> Iterator[MissingFile]:
    found = [name for name in _PROCESSOR_FILES if (folder / name).is_file()]
    names: list[str] = []
    if not found:
        names = [_PROCESSOR_FILES[0], *(name for name in _PROCESSOR_CODE if not (folder / name).is_file())]
    classes: dict[str, list[str]] = {}
    for file in (*found, *(n for n in ("config.json", TOKENIZER_CONFIG) if (folder / n).is_file())):
        of_file = _auto_map(read_json(folder / file))
        classes |= {f"{file} {name}": of for name, of in of_file.items() if name.startswith(_OTHERS)}
    names += [name for name in _lacking(folder, classes) if name not in names]
    yield from (MissingFile(name=name, needed_by=_PROCESSOR) for name in names)


def _auto_map(fields: Mapping[str, Any]) -> dict[str, list[str]]:
    """Read which classes of the folder's own code stand for the Auto classes; those of a hub are left out."""
    found = fields.get("auto_map")
    if not isinstance(found, Mapping):
        return {}
    several = {name: of if isinstance(of, list) else [of] for name, of in found.items()}
    return {name: [one for one in of if isinstance(one, str)] for name, of in several.items()}


def _lacking(folder: Path, classes: Mapping[str, list[str]]) -> Iterator[str]:
    """Yield the .py that are not there, of these classes and of what their files import from beside them."""
    own = [one for of in classes.values() for one in of if "--" not in one]
    named = {one: _CLASS.fullmatch(one) for one in own}
    yield from (
        f"{one!r:.80} of auto_map (it is no MODULE.CLASS)" for one, match in named.items() if not match
    )
    modules = [match[1] for match in named.values() if match]
    seen: set[str] = set()
    while modules:
        module = modules.pop(0)
        if module in seen:
            continue
        seen.add(module)
        file = folder / f"{module}.py"
        if not file.is_file():
            yield f"{module}.py"
            continue
        try:
            modules += _imports(file)
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
            yield f"{module}.py (it is no Python: {type(error).__name__})"


def _imports(file: Path) -> list[str]:
    """Return the modules beside a file that it imports, ``from .module import name``."""
    found = (node for node in ast.walk(ast.parse(read_text(file))) if isinstance(node, ast.ImportFrom))
    return sorted({node.module.split(".")[0] for node in found if node.level == 1 and node.module})
