from shoal.broadcast.http.limits import TokenBucket


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_bucket_spreads_bytes_over_time() -> None:
    clock = Clock()
    bucket = TokenBucket(1000, clock=clock)
    assert bucket.delay(250) == 0
    assert bucket.delay(500) == 0.5
    assert bucket.delay(500) == 1.0
    clock.now += 2
    assert bucket.delay(250) == 0


def test_no_rate_means_no_delay() -> None:
    assert TokenBucket(0).delay(1 << 40) == 0
