"""The length term of the reward: reward = task reward − α·|target − length|.

`length` is the number of output tokens, the end-of-sequence token included; a target of 0 means that no length was asked for.
"""


def length_penalty(target_length: int, length: int, alpha: float) -> float:
    """α·|target − length|, or 0 without a target."""
    return alpha * abs(target_length - length) if target_length else 0.0
