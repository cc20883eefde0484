"""What can be recomputed and compared: seeded sampling and commitments to hidden states."""

from shoal.proofs.sampling import NOISE_BITS, choose_tokens, gumbel_noise, hash_bits, hash_bits_np, token_margins

__all__ = ["NOISE_BITS", "choose_tokens", "gumbel_noise", "hash_bits", "hash_bits_np", "token_margins"]
