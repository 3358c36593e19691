from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = {}
exec((ROOT / "megatron_omni/__init__.py").read_text(), VERSION)


def requirements(name: str) -> list[str]:
    lines = (ROOT / name).read_text().splitlines()
    return [line for line in lines if line and not line.startswith(("#", "-"))]


setup(
    name="megatron_omni",
    version=VERSION["__version__"],
    description="RL post-training of image, video and omni models on Megatron-core",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["megatron_omni", "megatron_omni.*"]),
    package_data={"megatron_omni.training": ["templates/*"], "megatron_omni.rewards": ["templates/*"]},
    py_modules=["pretrain_rl"],
    install_requires=requirements("requirements.txt"),
    extras_require={"dev": requirements("requirements-dev.txt")},
    entry_points={
        "vllm_omni.platform_plugins": ["megatron_omni_cpu = megatron_omni.rollout.vllm_omni.cpu:platform"],
        "vllm_omni.general_plugins": ["megatron_omni_cpu = megatron_omni.rollout.vllm_omni.cpu:prepare"],
    },
)
