"""Engines that run a stage, behind one interface; imported when first needed."""
