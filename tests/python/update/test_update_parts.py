"""Updates of tensors that hold regions of a checkpoint's tensors, as servers have them."""

import pytest
import torch

import fst
from fst._checkpoint.region import Region
from fst._ranks.shards import Replicated
from fst._update.prepare_update import prepare_parts
from fst._update.target import Part


def test_regions_of_fused_and_sharded_tensors(tmp_path):
    stored = {"q": torch.randn(4, 6), "k": torch.randn(2, 6), "o": torch.randn(6, 8), "unused": torch.randn(3)}
    fst.save_file(stored, tmp_path / "model.safetensors")
    fused, shard = torch.zeros(6, 6), torch.zeros(6, 4)
    parts = [
        Part("q", "q", (4, 6), Replicated(), fused[:4]),
        Part("k", "k", (2, 6), Replicated(), fused[4:]),
        Part("o", "o", (6, 8), Region.unit_step((0, 4), (6, 4)), shard),
        # Another region of the same tensor, which is not contiguous in memory.
        Part("o", "o", (6, 8), Region.unit_step((1, 0), (2, 3)), torch.zeros(2, 5)[:, :3]),
    ]
    fst.set_version([fused, shard], "1")
    with fst.profile() as profile:
        update = prepare_parts(parts, tmp_path / "model.safetensors", version="2")
    read_bytes = profile.summary().read_bytes
    assert not fused.any()
    assert not shard.any()
    update.commit()
    torch.testing.assert_close(fused, torch.cat([stored["q"], stored["k"]]), rtol=0, atol=0)
    torch.testing.assert_close(shard, stored["o"][:, 4:], rtol=0, atol=0)
    torch.testing.assert_close(parts[3].tensor, stored["o"][1:3, :3], rtol=0, atol=0)
    assert fst.version_of([fused, shard]) == "2"
    assert read_bytes <= sum(tensor.nbytes for tensor in stored.values()) - stored["unused"].nbytes

    newer = {name: tensor.clone() for name, tensor in stored.items()}
    newer["q"][1, 2] += 1
    newer["o"][:, ::3] += 1
    fst.save_delta(stored, newer, tmp_path / "delta", version="3", base_version="2")
    prepare_parts(parts, tmp_path / "delta").commit()
    torch.testing.assert_close(fused, torch.cat([newer["q"], newer["k"]]), rtol=0, atol=0)
    torch.testing.assert_close(shard, newer["o"][:, 4:], rtol=0, atol=0)
    torch.testing.assert_close(parts[3].tensor, newer["o"][1:3, :3], rtol=0, atol=0)
    assert fst.version_of([fused, shard]) == "3"

    wrong = [parts[0]._replace(shape=(8, 6)), parts[1]._replace(name="v", stored="v")]
    with pytest.raises(fst.ModuleMismatchError) as error:
        prepare_parts(wrong, tmp_path / "model.safetensors")
    assert (error.value.missing_keys, error.value.misshapen_keys) == (["v"], ["q"])
