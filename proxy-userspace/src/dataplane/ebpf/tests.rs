//! Laws and effects of the eBPF plan.
