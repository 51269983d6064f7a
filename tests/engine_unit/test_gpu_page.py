"""docs/quickstart-gpu.md names the CUDA version and GPUs for which the pinned torch is built."""

import re
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "quickstart-gpu.md").read_text(encoding="utf-8")
# https://docs.nvidia.com/cuda/cuda-toolkit-release-notes/, the table of minimum driver versions.
DRIVERS = {"13": 580}


def test_the_page_names_the_torch_that_is_installed_and_its_cuda():
    version = torch.__version__.partition("+")[0]

    assert f"torch=={version}" in (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert f"the torch of the image ({version}) is built for CUDA {torch.version.cuda}" in PAGE
    assert f"| driver | {DRIVERS[torch.version.cuda.partition('.')[0]]} or newer:" in PAGE


def test_the_page_names_the_gpus_that_it_is_built_for():
    built = [f"{name[3:-1]}.{name[-1]}" for name in torch._C._cuda_getArchFlags().split() if name.startswith("sm_")]
    (said,) = re.findall(r"compute capability ([\d., or]+), or a higher one", PAGE)

    assert re.findall(r"\d+\.\d", said) == built
