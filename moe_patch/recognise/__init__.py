"""Is this module part of a MoE block, and can it be fused? Nothing here is about one family."""
