"""What a deployment would take, before it is bought: formulas only. Imports neither models nor sockets."""
