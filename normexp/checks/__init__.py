"""What is measured of a network before it trains, and of a norm by itself: its card."""

from normexp.checks.contract import assert_contract

__all__ = ["assert_contract"]
