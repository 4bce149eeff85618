//! Encodes instructions of BPF, for the small programs that are made at run time.

/// Registers and operations of BPF (`include/uapi/linux/bpf.h`).
pub(super) mod op {
    pub(in crate::kernel::bpf) const LOAD_U32: u8 = 0x61;
    pub(in crate::kernel::bpf) const STORE_U32: u8 = 0x63;
    pub(in crate::kernel::bpf) const STORE_U16: u8 = 0x6b;
    pub(in crate::kernel::bpf) const STORE_U64: u8 = 0x7b;
    pub(in crate::kernel::bpf) const STORE_U32_CONSTANT: u8 = 0x62;
    pub(in crate::kernel::bpf) const LOAD_CONSTANT: u8 = 0x18;
    pub(in crate::kernel::bpf) const MOVE: u8 = 0xbf;
    pub(in crate::kernel::bpf) const MOVE_CONSTANT: u8 = 0xb7;
    pub(in crate::kernel::bpf) const ADD: u8 = 0x0f;
    pub(in crate::kernel::bpf) const ADD_CONSTANT: u8 = 0x07;
    pub(in crate::kernel::bpf) const AND_CONSTANT: u8 = 0x57;
    pub(in crate::kernel::bpf) const SHIFT_RIGHT_CONSTANT: u8 = 0x77;
    pub(in crate::kernel::bpf) const XOR_CONSTANT: u8 = 0xa7;
    pub(in crate::kernel::bpf) const TO_BIG_ENDIAN: u8 = 0xdc;
    pub(in crate::kernel::bpf) const JUMP_UNLESS_LESS: u8 = 0x3d;
    pub(in crate::kernel::bpf) const JUMP_UNLESS_EQUAL_CONSTANT: u8 = 0x55;
    pub(in crate::kernel::bpf) const JUMP_IF_LESS_CONSTANT: u8 = 0xa5;
    pub(in crate::kernel::bpf) const CALL: u8 = 0x85;
    pub(in crate::kernel::bpf) const EXIT: u8 = 0x95;
    pub(in crate::kernel::bpf) const MOVE_CONSTANT_32: u8 = 0xb4;
    pub(in crate::kernel::bpf) const SHIFT_LEFT_32: u8 = 0x6c;
    pub(in crate::kernel::bpf) const JUMP_IF_SET: u8 = 0x4d;
    /// The constant is the descriptor of a map.
    pub(in crate::kernel::bpf) const MAP: u8 = 1;
    /// `bpf_map_lookup_elem`.
    pub(in crate::kernel::bpf) const LOOKUP: i32 = 1;
    /// `bpf_tail_call`.
    pub(in crate::kernel::bpf) const TAIL_CALL: i32 = 12;
    /// The constant is the descriptor of a map, and an offset in its first value. Kernel 5.2
    /// (d8eca5bbb2be).
    pub(in crate::kernel::bpf) const MAP_VALUE: u8 = 2;
    /// The call is of a function of the program, from the next instruction on.
    pub(in crate::kernel::bpf) const FUNCTION: u8 = 1;
    /// `bpf_xdp_adjust_tail`.
    pub(in crate::kernel::bpf) const XDP_ADJUST_TAIL: i32 = 65;
}

/// Returns an instruction. Registers are 0 to 10.
pub(super) fn instruction(operation: u8, [to, from]: [u8; 2], offset: i16, constant: i32) -> u64 {
    u64::from(operation)
        | u64::from(to | from << 4) << 8
        | u64::from(offset.cast_unsigned()) << 16
        | u64::from(constant.cast_unsigned()) << 32
}

/// Returns both instructions that load a constant of 64 bits.
pub(super) fn load_constant(to: u8, from: u8, value: u64) -> [u64; 2] {
    let [low, high] = [value, value >> 32].map(|half| half << 32);
    [u64::from(op::LOAD_CONSTANT) | u64::from(to | from << 4) << 8 | low, high]
}
