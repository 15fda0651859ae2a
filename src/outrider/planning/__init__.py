"""What a deployment would take, before it is bought: formulas, recorded traces, and their replay in virtual time."""
