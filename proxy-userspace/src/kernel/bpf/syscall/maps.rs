//! Commands of bpf(2) for maps.

use std::{
    io,
    mem::MaybeUninit,
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
};

use super::{bpf, bpf_object, bpf_with_output, number, object_name};

const BPF_MAP_CREATE: libc::c_int = 0;
const BPF_MAP_LOOKUP_ELEM: libc::c_int = 1;
const BPF_MAP_UPDATE_ELEM: libc::c_int = 2;
const BPF_MAP_FREEZE: libc::c_int = 22;
const BPF_MAP_LOOKUP_BATCH: libc::c_int = 24;
const BPF_MAP_UPDATE_BATCH: libc::c_int = 26;
const BPF_MAP_TYPE_ARRAY: u32 = 2;
const BPF_MAP_TYPE_PROG_ARRAY: u32 = 3;
/// Programs may only read the map.
const BPF_F_RDONLY_PROG: u32 = 1 << 7;

/// The head of the attribute.
#[repr(C)]
#[derive(Default)]
struct MapCreate {
    map_type: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    map_flags: u32,
    inner_map_fd: u32,
    numa_node: u32,
    map_name: [u8; 16],
}

#[repr(C)]
struct MapFreeze {
    map_fd: u32,
}

/// The kernel calls `from` and `next` `in_batch` and `out_batch`.
#[repr(C)]
#[derive(Default)]
struct Batch {
    from: u64,
    next: u64,
    keys: u64,
    values: u64,
    count: u32,
    map_fd: u32,
    elem_flags: u64,
    flags: u64,
}

#[repr(C)]
#[derive(Default)]
struct Element {
    map_fd: u32,
    padding: u32,
    key: u64,
    value: u64,
    flags: u64,
}

/// The result of a call that reads a batch.
pub(in crate::kernel::bpf) struct BatchRead {
    /// The number of entries that were read.
    pub(in crate::kernel::bpf) count: usize,
    /// The position of the next batch; `None` at the end.
    pub(in crate::kernel::bpf) next: Option<u32>,
}

/// Reads a batch of entries of a map, from the position that an earlier call returned.
pub(in crate::kernel::bpf) fn lookup_batch<K, V>(
    map: &OwnedFd,
    from: Option<u32>,
    keys: &mut [MaybeUninit<K>],
    values: &mut [MaybeUninit<V>],
) -> io::Result<BatchRead> {
    let mut next = 0u32;
    let from = from.as_ref();
    let mut attribute = Batch {
        from: from.map_or(0, |position| std::ptr::from_ref(position) as u64),
        next: (&raw mut next) as u64,
        keys: keys.as_mut_ptr() as u64,
        values: values.as_mut_ptr() as u64,
        count: u32::try_from(keys.len().min(values.len())).unwrap_or(u32::MAX),
        map_fd: number(map.as_fd()),
        ..Batch::default()
    };
    let result = bpf_with_output(BPF_MAP_LOOKUP_BATCH, &mut attribute);
    let count = attribute.count as usize;
    match result {
        Ok(_) => Ok(BatchRead { count, next: Some(next) }),
        // The end of the map. The entries before it have been written.
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(BatchRead { count, next: None }),
        Err(error) => Err(error),
    }
}

/// Inserts or replaces entries of a map, in this order. Returns how many: the kernel stops at the
/// first that fails.
pub(in crate::kernel::bpf) fn update_batch<K, V>(map: &OwnedFd, keys: &[K], values: &[V]) -> usize {
    let mut attribute = Batch {
        keys: keys.as_ptr() as u64,
        values: values.as_ptr() as u64,
        count: u32::try_from(keys.len().min(values.len())).unwrap_or(u32::MAX),
        map_fd: number(map.as_fd()),
        ..Batch::default()
    };
    let all = attribute.count;
    match bpf_with_output(BPF_MAP_UPDATE_BATCH, &mut attribute) {
        Ok(_) => all as usize,
        // A kernel without this command, or one that refuses it, leaves the count.
        Err(_) if attribute.count >= all => 0,
        Err(_) => attribute.count as usize,
    }
}

/// Reads the first value of an array. `value` has the size of the values.
pub(in crate::kernel::bpf) fn lookup_first(map: BorrowedFd<'_>, value: &mut [u8]) -> io::Result<()> {
    let key = 0u32;
    let (key, value) = ((&raw const key) as u64, value.as_mut_ptr() as u64);
    let attribute = Element { map_fd: number(map), key, value, ..Element::default() };
    bpf(BPF_MAP_LOOKUP_ELEM, attribute).map(drop)
}

/// Creates an array of one program, which others call.
pub(in crate::kernel::bpf) fn create_program_array(program: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let array = create_small(BPF_MAP_TYPE_PROG_ARRAY)?;
    let (key, value) = (0u32, number(program));
    let (key, value) = ((&raw const key) as u64, (&raw const value) as u64);
    let attribute = Element { map_fd: number(array.as_fd()), key, value, ..Element::default() };
    bpf(BPF_MAP_UPDATE_ELEM, attribute)?;
    Ok(array)
}

/// Creates an array of one word, which is the smallest map.
pub(in crate::kernel::bpf) fn create_array() -> io::Result<OwnedFd> {
    create_small(BPF_MAP_TYPE_ARRAY)
}

fn create_small(map_type: u32) -> io::Result<OwnedFd> {
    let attribute =
        MapCreate { map_type, key_size: 4, value_size: 4, max_entries: 1, ..MapCreate::default() };
    bpf_object(BPF_MAP_CREATE, attribute)
}

/// Creates an array of one value that never changes, so that the verifier takes it as fixed. Kernel
/// 5.2 (87df15de441b).
pub(in crate::kernel::bpf) fn create_constants(name: &str, value: &[u8]) -> io::Result<OwnedFd> {
    let attribute = MapCreate {
        map_type: BPF_MAP_TYPE_ARRAY,
        key_size: 4,
        value_size: u32::try_from(value.len()).map_err(io::Error::other)?,
        max_entries: 1,
        map_flags: BPF_F_RDONLY_PROG,
        map_name: object_name(name),
        ..MapCreate::default()
    };
    let constants = bpf_object(BPF_MAP_CREATE, attribute)?;
    let map_fd = number(constants.as_fd());
    let key = 0u32;
    let (key, value) = ((&raw const key) as u64, value.as_ptr() as u64);
    bpf(BPF_MAP_UPDATE_ELEM, Element { map_fd, key, value, ..Element::default() })?;
    bpf(BPF_MAP_FREEZE, MapFreeze { map_fd })?;
    Ok(constants)
}
