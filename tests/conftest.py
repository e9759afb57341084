"""How long an example of a property takes on the wall clock tells what else the machine does: no property fails by it."""

from hypothesis import HealthCheck, settings

settings.register_profile("shared", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")
