"""Property tests run the same way every time, and are never judged by the speed of the machine."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "shoal",
    derandomize=True,
    deadline=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
settings.load_profile("shoal")
