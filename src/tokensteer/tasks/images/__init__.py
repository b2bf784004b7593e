"""Binary images: `digits` (8 × 8) and `mnist` (28 × 28)."""
