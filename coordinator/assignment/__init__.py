"""From a plan to stages that serve: prepare, ready, activate, retire; loss and recovery; pure."""
