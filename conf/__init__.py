"""The configuration: Hydra groups as YAML files."""
