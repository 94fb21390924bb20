"""The example of a training that saves each step in the background, is killed, and resumes."""

import os
import runpy
import signal
from unittest import mock

import pytest
import torch.distributed as dist

import fst
from rank_processes import Ranks
from suite import CHECKOUT

STEPS = 6


def train(directory, kill_at=None):
    program = runpy.run_path(str(CHECKOUT / "examples" / "training.py"))
    save, calls = fst.save_distributed, []

    def killing(*arguments, **options):
        calls.append(arguments)
        if len(calls) == kill_at and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return save(*arguments, **options)

    with mock.patch.object(fst, "save_distributed", killing):
        return program["train"](str(directory), STEPS)


def test_killed_training_resumes(ranks, tmp_path):
    expected = ranks(2).run(train, tmp_path / "whole")[0]
    assert len(expected) == STEPS
    with pytest.raises(AssertionError, match="rank 1: ended with exit code -9"):
        Ranks(2).run(train, tmp_path / "killed", 4)
    done = int(fst.load_file(tmp_path / "killed")["done"])
    assert 0 < done < STEPS
    # With another number of ranks.
    losses = ranks(4).run(train, tmp_path / "killed")[0]
    assert losses == pytest.approx(expected[done:], rel=1e-4)
    assert os.listdir(tmp_path / "killed") == ["model.safetensors"]
