"""Measures a network before it trains, and a norm by itself: its card."""

from normexp.checks.card import assert_contract

__all__ = ["assert_contract"]
