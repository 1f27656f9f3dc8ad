"""Leaves on the public API: commands, checkpoints, trainers, Ray readers, telemetry, sequences, buckets."""
