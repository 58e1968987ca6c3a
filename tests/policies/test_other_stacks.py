"""Exports open by `from_pretrained(..., trust_remote_code=True)` of another process that has no asyncrl."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from asyncrl.policies.openvla.export import convert, missing_files
from asyncrl.policies.openvla.policy import load_policy
from support.published import (
    CONFIG,
    TASK,
    all_tensors,
    assert_same,
    published_tensors,
    run_cli,
    write_published,
)

CONFIGURATION = """
from transformers import PretrainedConfig

class SomeConfig(PretrainedConfig):
    model_type = "openvla"

    def __init__(self, shapes=None, **rest):
        self.shapes = shapes or {}
        super().__init__(**rest)
"""
MODELING = """
import torch
from torch import nn
from transformers import PreTrainedModel

from .configuration_some import SomeConfig

class SomeModel(PreTrainedModel):
    config_class = SomeConfig
    base_model_prefix = ""

    def __init__(self, config):
        super().__init__(config)
        for name, shape in config.shapes.items():
            *path, last = name.split(".")
            place = self
            for part in path:
                if part not in place._modules:
                    place.add_module(part, nn.Module())
                place = place._modules[part]
            place.register_parameter(last, nn.Parameter(torch.zeros(*shape)))
        self.post_init()

    def _init_weights(self, module):
        pass
"""
OTHER_PROCESS = """
import json, sys
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModel, AutoTokenizer

assert "asyncrl" not in sys.modules
folder, out = sys.argv[1:]
config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
model, loading = AutoModel.from_pretrained(
    folder, trust_remote_code=True, dtype="auto", output_loading_info=True
)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
save_file({name: p.detach() for name, p in model.named_parameters()}, out + "/opened.safetensors")
said = {
    "config": type(config).__name__,
    "model": type(model).__name__,
    "dtype": str(config.dtype),
    "pad": config.pad_token_id,
    "missing": sorted(loading["missing_keys"]),
    "unexpected": sorted(loading["unexpected_keys"]),
    "ids": tokenizer(sys.stdin.read())["input_ids"],
    "bos": tokenizer.bos_token,
}
print(json.dumps(said))
"""


def original_of_another_stack(folder: Path) -> Path:
    """A published folder with code of its own, which `auto_map` names, as OpenVLA's folders have."""
    tensors = published_tensors()
    write_published(
        folder,
        tensors,
        config=CONFIG,
        architectures=["SomeModel"],
        auto_map={"AutoConfig": "configuration_some.SomeConfig", "AutoModel": "modeling_some.SomeModel"},
        shapes={name: list(tensor.shape) for name, tensor in tensors.items()},
        pad_token_id=CONFIG.token_count,
        torch_dtype="bfloat16",
    )
    (folder / "configuration_some.py").write_text(CONFIGURATION)
    (folder / "modeling_some.py").write_text(MODELING)
    (folder / "processing_some.py").write_text("from transformers import ProcessorMixin\n")
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"auto_map": {"AutoProcessor": "processing_some.SomeProcessor"}})
    )
    (folder / "generation_config.json").write_text(json.dumps({"pad_token_id": CONFIG.token_count}))
    return folder


def trained(original: Path, folder: Path) -> Path:
    """What training makes of it: a checkpoint that carries nothing of other stacks."""
    convert(original, folder / "ours")
    policy = load_policy(folder / "ours")
    with torch.no_grad():
        policy.projector.fc3.weight.add_(1.0)
    policy.save(folder / "trained")
    return folder / "trained"


def opened_elsewhere(folder: Path, tmp_path: Path) -> dict[str, object]:
    environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [sys.executable, "-c", OTHER_PROCESS, str(folder), str(tmp_path)],
        input=f"<s>In: What action should the robot take to {TASK}?\nOut: ",
        capture_output=True,
        text=True,
        timeout=110,
        env=environment,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_another_process_opens_an_export_with_the_originals_own_classes(tmp_path, capsys) -> None:
    original = original_of_another_stack(tmp_path / "original")
    checkpoint, out = trained(original, tmp_path), tmp_path / "out"
    assert run_cli(checkpoint, out, "--original", original) == 0
    printed = capsys.readouterr().out
    assert "missing" not in printed
    code = "configuration_some.py, generation_config.json, modeling_some.py"
    assert f"carried   {code}, preprocessor_config.json, processing_some.py" in printed
    said = opened_elsewhere(out, tmp_path)
    assert (said["config"], said["model"]) == ("SomeConfig", "SomeModel")
    assert (said["missing"], said["unexpected"]) == ([], [])
    assert (said["dtype"], said["pad"], said["bos"]) == ("torch.float32", CONFIG.token_count, "<s>")
    assert said["ids"] == list(load_policy(checkpoint).tokenizer.ids(TASK))
    expected = published_tensors()
    expected["projector.fc3.weight"] += 1.0
    assert_same(load_file(tmp_path / "opened.safetensors"), expected)
    assert_same(all_tensors(out), expected)
    assert json.loads((out / "config.json").read_text())["architectures"] == ["SomeModel"]


def test_without_the_original_the_command_says_what_is_missing_and_how_to_give_it(tmp_path, capsys) -> None:
    original = original_of_another_stack(tmp_path / "original")
    assert run_cli(trained(original, tmp_path), tmp_path / "out") == 0
    assert "missing   config.json with auto_map, configuration_prismatic.py" in capsys.readouterr().out
    model = ["config.json with auto_map", "configuration_prismatic.py", "modeling_prismatic.py"]
    assert missing_files(tmp_path / "out") == [*model, "preprocessor_config.json", "processing_prismatic.py"]
    written = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert (written["bos_token"], written["eos_token"], written["unk_token"]) == ("<s>", "</s>", "<unk>")
    assert "pad_token" not in written, "the small vocabulary has no word for it"


def test_an_original_that_lacks_files_is_told_apart_from_none(tmp_path, capsys) -> None:
    original = original_of_another_stack(tmp_path / "original")
    checkpoint = trained(original, tmp_path)
    (original / "configuration_some.py").unlink()
    (original / "processing_some.py").unlink()
    assert run_cli(checkpoint, tmp_path / "out", "--original", original) == 0
    printed = capsys.readouterr().out
    assert "missing   configuration_some.py, processing_some.py" in printed
    assert "--original" in printed


def test_classes_of_a_hub_are_not_looked_for_in_the_folder(tmp_path: Path) -> None:
    folder = original_of_another_stack(tmp_path)
    fields = json.loads((folder / "config.json").read_text())
    hub = {"AutoConfig": "owner/name--configuration_x.Config", "AutoModel": "modeling_other.Model"}
    (folder / "config.json").write_text(json.dumps(fields | {"auto_map": hub}))
    assert missing_files(folder) == ["modeling_other.py"]
