"""Load from and export to Hugging Face folders."""

import json
from pathlib import Path

import pytest
import torch

from megatron_omni.checkpoint.hf import export_hf, hf_tensors, load_hf
from tests.checkpoint import toy_megatron as toy
from tests.checkpoint.folders import hashes
from tests.distributed import run_distributed


def load_and_export(tensor_parallel: int, bf16: bool, jobs: list[tuple[Path, Path]]) -> None:
    model = toy.build(tensor_parallel, bf16)
    for source, target in jobs:
        load_hf([model], toy.MAPPING, source / "transformer")
        export_hf([model], toy.MAPPING, source, target)


def gathered(tensor_parallel: int, source: Path) -> dict[str, torch.Tensor]:
    model = toy.build(tensor_parallel)
    load_hf([model], toy.MAPPING, source / "transformer")
    return dict(hf_tensors([model], toy.MAPPING))


def errors_of(tensor_parallel: int, sources: list[Path]) -> list[str]:
    """The message of the error that loading each source raises."""
    model = toy.build(tensor_parallel)
    messages = []
    for source in sources:
        with pytest.raises(Exception) as caught:
            load_hf([model], toy.MAPPING, source / "transformer")
        messages.append(f"{caught.type.__name__}: {caught.value}")
    return messages


@pytest.mark.parametrize("tensor_parallel", [1, 2, 4])
def test_export_of_untrained_weights_is_byte_identical(tmp_path, tensor_parallel):
    jobs = []
    for shards in (1, 3):
        for dtype in (torch.float32, torch.bfloat16):
            name = f"{dtype}-{shards}".removeprefix("torch.")
            jobs.append(
                (toy.hf_folder(tmp_path / name, toy.hf_tensors(dtype), shards), tmp_path / f"{name}-out")
            )
    run_distributed(load_and_export, tensor_parallel, tensor_parallel, False, jobs)
    for source, target in jobs:
        assert hashes(target) == hashes(source)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        path.name for job in jobs for path in job
    )


def test_export_from_a_bf16_model_is_byte_identical_for_a_bf16_source(tmp_path):
    source = toy.hf_folder(tmp_path / "source", toy.hf_tensors(torch.bfloat16), shards=2)
    run_distributed(load_and_export, 2, 2, True, [(source, tmp_path / "out")])
    assert hashes(tmp_path / "out") == hashes(source)


def test_layout_order_and_metadata_of_a_foreign_writer_are_kept(tmp_path):
    """An order of tensors, and spaces and entries in the header, that the library does not write."""
    tensors = dict(reversed(toy.hf_tensors(torch.float16).items()))
    source = toy.hf_folder(tmp_path / "source", tensors)
    header, data = {"__metadata__": {"format": "pt", "by": "someone"}}, b""
    for name, tensor in tensors.items():
        start, data = len(data), data + tensor.numpy().tobytes()
        header[name] = {"dtype": "F16", "shape": list(tensor.shape), "data_offsets": [start, len(data)]}
    text = json.dumps(header, indent=1).encode()
    text += b" " * (-len(text) % 8)
    path = source / "transformer" / "diffusion_pytorch_model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    run_distributed(load_and_export, 2, 2, False, [(source, tmp_path / "out")])
    assert hashes(tmp_path / "out") == hashes(source)


def test_tensors_are_the_folders_on_every_rank(tmp_path):
    tensors = toy.hf_tensors()
    for result in run_distributed(gathered, 4, 2, toy.hf_folder(tmp_path / "source", tensors)):
        assert result.keys() == tensors.keys()
        assert all(torch.equal(result[name], tensors[name]) for name in tensors)


def test_changed_weights_are_exported(tmp_path):
    """An older export is replaced, and nothing of the source but the weights is changed."""
    first = toy.hf_folder(tmp_path / "first", toy.hf_tensors(seed=1))
    second = toy.hf_folder(tmp_path / "second", toy.hf_tensors(seed=2))
    run_distributed(export_over, 2, first, second, tmp_path / "out")
    assert hashes(tmp_path / "out") == hashes(second)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "out", "second"]


def export_over(first: Path, second: Path, target: Path) -> None:
    model = toy.build(2)
    load_hf([model], toy.MAPPING, first / "transformer")
    export_hf([model], toy.MAPPING, first, target)
    load_hf([model], toy.MAPPING, second / "transformer")
    export_hf([model], toy.MAPPING, first, target)


def test_stale_copies_of_the_weights_are_not_exported(tmp_path):
    source = toy.hf_folder(tmp_path / "source", toy.hf_tensors())
    for name in ("diffusion_pytorch_model.fp16.safetensors", "diffusion_pytorch_model.bin"):
        (source / "transformer" / name).write_bytes(b"old weights")
    run_distributed(load_and_export, 1, 1, False, [(source, tmp_path / "out")])
    assert set(hashes(source)) - set(hashes(tmp_path / "out")) == {
        "transformer/diffusion_pytorch_model.fp16.safetensors",
        "transformer/diffusion_pytorch_model.bin",
    }


def test_faults_of_a_folder_are_named_on_every_rank(tmp_path):
    good = toy.hf_tensors()
    sources = {}

    def broken(name: str, tensors: dict | None = None, shards: int = 1) -> Path:
        sources[name] = toy.hf_folder(tmp_path / name, tensors or good, shards)
        return sources[name] / "transformer"

    names = {**good, "extra.weight": torch.ones(2), "embed.weight": torch.ones(64, 4)}
    del names["blocks.1.up.bias"]
    broken("names", names)
    broken("dtype", {**good, "embed.bias": torch.ones(64, dtype=torch.int32)})
    for path in broken("empty").glob("*.safetensors"):
        path.unlink()
    sources["absent"] = tmp_path / "absent"
    path = broken("truncated") / "diffusion_pytorch_model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    (broken("garbage") / "diffusion_pytorch_model.safetensors").write_bytes(b"\0" * 4096)
    shard = "diffusion_pytorch_model-00002-of-00003.safetensors"
    (broken("shard", shards=3) / shard).unlink()
    index = "diffusion_pytorch_model.safetensors.index.json"
    (broken("index", shards=3) / index).write_text("{")
    path = broken("map", shards=3) / index
    path.write_text(path.read_text().replace('"embed.bias"', '"embed.scale"'))

    ranks = run_distributed(errors_of, 2, 2, list(sources.values()))
    for messages in (dict(zip(sources, rank, strict=True)) for rank in ranks):
        assert all(message.startswith("UserError: ") for message in messages.values())
        assert "extra.weight: not in the model" in messages["names"]
        assert "blocks.1.up.bias: missing in the folder" in messages["names"]
        assert "embed.weight: [64, 4] in the folder, [64, 3] in the model" in messages["names"]
        assert "embed.bias: dtype I32" in messages["dtype"]
        assert "holds no weights" in messages["empty"]
        assert f"{tmp_path / 'absent' / 'transformer'} does not exist" in messages["absent"]
        assert "cannot be read" in messages["truncated"] and "cannot be read" in messages["garbage"]
        assert f"{shard} is missing" in messages["shard"]
        assert f"{index} is damaged" in messages["index"]
        assert "embed.bias, embed.scale" in messages["map"]
