"""Configuration: one frozen ``Config``, built once from file < environment < flags."""
