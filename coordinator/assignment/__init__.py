"""Plan to prepare, ready, activate, retire; loss and recovery. Pure."""
