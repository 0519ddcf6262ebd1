"""What --help says, read from the YAMLs."""

from __future__ import annotations

from omegaconf import OmegaConf

from normexp.config.help import conf_dir, help_text


def test_help_names_every_value_of_the_config_with_its_meaning():
    config = OmegaConf.load(conf_dir() / "config.yaml")
    keys = {str(key) for key in config} - {"defaults", "hydra", "tune"}  # has its own help
    lines = [line.split() for line in help_text().partition("Values (")[2].splitlines()]
    told = {words[0].partition("=")[0] for words in lines if len(words) > 1}
    assert keys - told == set()
