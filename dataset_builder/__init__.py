"""What a training job is, what it executes and what was measured: the facts, without any estimate."""

__version__ = "0.1.0"
