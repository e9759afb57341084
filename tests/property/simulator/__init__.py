"""Tests of coordinator.simulator."""
