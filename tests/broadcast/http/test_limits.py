from shoal.broadcast.http.limits import ClientCount, TokenBucket


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


def test_places_are_limited_per_client_and_in_all() -> None:
    places = ClientCount(per_client=2, total=3)
    assert places.enter("a")
    assert places.enter("a")
    assert not places.enter("a")
    assert places.enter("b")
    assert not places.enter("c")
    places.leave("a")
    assert places.enter("c")
