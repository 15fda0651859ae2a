"""Planning of a deployment: recorded traces, their replay in virtual time, gate calibration and mode ranking."""
