"""Scenarios, discrete-event execution, calibration. Pure."""
