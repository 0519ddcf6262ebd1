"""Measures a network before it trains, and a norm by itself: its card."""

from normexp.training.checks.card import assert_contract

__all__ = ["assert_contract"]
