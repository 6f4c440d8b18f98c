"""moriiod: a standalone prefill/decode KV-transfer daemon."""

__version__ = "0.1.0"
