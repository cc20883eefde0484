"""The demo's recipe at some temperature."""

from pathlib import Path

from shoal.config import ShoalConfig, load_config

ROOT = Path(__file__).resolve().parents[2]


def demo(temperature: float = 1.0) -> ShoalConfig:
    config = load_config(ROOT / "src" / "shoal" / "host" / "demo.toml")
    return config.model_copy(update={"rollouts": config.rollouts.model_copy(update={"temperature": temperature})})
