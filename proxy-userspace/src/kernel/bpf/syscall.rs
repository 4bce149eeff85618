//! Calls bpf(2) for commands that the BPF library does not offer in this form: for BPF links of
//! cgroups and network links, and for batches of map entries.

use std::{
    ffi::CString,
    io,
    mem::{MaybeUninit, size_of, zeroed},
    os::{
        fd::{AsFd as _, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd},
        unix::ffi::OsStrExt as _,
    },
    path::Path,
};

const BPF_MAP_CREATE: libc::c_int = 0;
const BPF_PROG_LOAD: libc::c_int = 5;
const BPF_OBJ_PIN: libc::c_int = 6;
const BPF_OBJ_GET: libc::c_int = 7;
const BPF_PROG_TEST_RUN: libc::c_int = 10;
const BPF_OBJ_GET_INFO_BY_FD: libc::c_int = 15;
const BPF_PROG_QUERY: libc::c_int = 16;
const BPF_MAP_LOOKUP_ELEM: libc::c_int = 1;
const BPF_MAP_UPDATE_ELEM: libc::c_int = 2;
const BPF_MAP_LOOKUP_BATCH: libc::c_int = 24;
const BPF_MAP_UPDATE_BATCH: libc::c_int = 26;
const BPF_LINK_CREATE: libc::c_int = 28;
const BPF_LINK_GET_NEXT_ID: libc::c_int = 31;
const BPF_LINK_UPDATE: libc::c_int = 29;
const BPF_LINK_DETACH: libc::c_int = 34;

/// Attach before all other programs.
const BPF_F_BEFORE: u32 = 1 << 3;
const BPF_LINK_TYPE_TCX: u32 = 11;
const BPF_LINK_TYPE_XDP: u32 = 6;
const BPF_XDP: u32 = 37;
const BPF_MAP_TYPE_ARRAY: u32 = 2;
const BPF_MAP_TYPE_PROG_ARRAY: u32 = 3;
/// The maximal number of programs on a hook of a link (`BPF_MPROG_MAX`).
const MAX_ON_A_HOOK: usize = 64;

/// The size of the buffer for attributes, larger than any of them. The kernel wants zeros in the
/// rest.
const ATTR_SIZE: usize = 80;

/// The head of the attribute. The rest, which is zero, means no flags and no name.
#[repr(C)]
struct MapCreate {
    map_type: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
}

/// The head of the attribute, as above.
#[repr(C)]
#[derive(Default)]
struct ProgramLoad {
    prog_type: u32,
    insn_cnt: u32,
    insns: u64,
    license: u64,
    log: [u32; 4],
    kern_version: u32,
    prog_flags: u32,
    prog_name: [u8; 16],
    prog_ifindex: u32,
    expected_attach_type: u32,
}

#[repr(C)]
struct Obj {
    pathname: u64,
    bpf_fd: u32,
    file_flags: u32,
}

#[repr(C)]
struct InfoByFd {
    bpf_fd: u32,
    info_len: u32,
    info: u64,
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
struct LinkUpdate {
    link_fd: u32,
    new_prog_fd: u32,
    flags: u32,
    old_prog_fd: u32,
}

#[repr(C)]
#[derive(Default)]
struct LinkCreate {
    prog_fd: u32,
    target_ifindex: u32,
    attach_type: u32,
    flags: u32,
    relative_fd: u32,
    padding: u32,
    expected_revision: u64,
}

#[repr(C)]
struct NextId {
    start: u32,
    next: u32,
    open_flags: u32,
}

#[repr(C)]
struct LinkDetach {
    link_fd: u32,
}

#[repr(C)]
#[derive(Default)]
struct ProgQuery {
    target_ifindex: u32,
    attach_type: u32,
    query_flags: u32,
    attach_flags: u32,
    prog_ids: u64,
    count: u32,
    padding: u32,
    prog_attach_flags: u64,
    link_ids: u64,
    link_attach_flags: u64,
    revision: u64,
}

/// The head of `struct bpf_link_info`. The body depends on the type of the link.
#[repr(C)]
struct LinkInfo {
    link_type: u32,
    id: u32,
    prog_id: u32,
    padding: u32,
    body: [u8; 48],
}

/// The bytes of `struct bpf_prog_info` before `run_time_ns`. The zeros ask for no lists.
const PROGRAM_INFO_HEAD: usize = 192;

/// The beginning of `struct bpf_prog_info`.
#[repr(C, align(8))]
struct ProgramInfo {
    head: [u8; PROGRAM_INFO_HEAD],
    run_time_ns: u64,
    runs: u64,
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

#[repr(C)]
#[derive(Default)]
struct TestRun {
    prog_fd: u32,
    retval: u32,
    data_size_in: u32,
    data_size_out: u32,
    data_in: u64,
    data_out: u64,
    repeat: u32,
    duration: u32,
    ctx_size_in: u32,
    ctx_size_out: u32,
    ctx_in: u64,
    ctx_out: u64,
    flags: u32,
    cpu: u32,
    batch_size: u32,
    padding: u32,
}

/// Calls bpf(2).
fn bpf<A>(command: libc::c_int, mut attribute: A) -> io::Result<RawFd> {
    bpf_with_output(command, &mut attribute)
}

/// Calls bpf(2) for a command that writes to its attribute.
fn bpf_with_output<A>(command: libc::c_int, attribute: &mut A) -> io::Result<RawFd> {
    const { assert!(size_of::<A>() <= ATTR_SIZE, "the attribute fits") };
    let mut buffer = [0u64; ATTR_SIZE / 8];
    // SAFETY: `buffer` is at least as large as `A`, and aligned to 8, which is the largest
    // alignment of a field here.
    unsafe { buffer.as_mut_ptr().cast::<A>().copy_from_nonoverlapping(attribute, 1) };
    // SAFETY: the kernel reads ATTR_SIZE bytes. The callers vouch for pointers in the attribute.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, buffer.as_mut_ptr(), ATTR_SIZE) };
    // SAFETY: as above. The attributes consist of integers, for which every bit pattern is valid.
    unsafe { buffer.as_ptr().cast::<A>().copy_to_nonoverlapping(attribute, 1) };
    RawFd::try_from(result).ok().filter(|&fd| fd >= 0).ok_or_else(io::Error::last_os_error)
}

/// The result of a call that reads a batch.
pub(super) struct BatchRead {
    /// The number of entries that were read.
    pub(super) count: usize,
    /// The position of the next batch; `None` at the end.
    pub(super) next: Option<u32>,
}

/// Reads a batch of entries of a map, from the position that an earlier call returned.
pub(super) fn lookup_batch<K, V>(
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
pub(super) fn update_batch<K, V>(map: &OwnedFd, keys: &[K], values: &[V]) -> usize {
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
pub(super) fn lookup_first(map: BorrowedFd<'_>, value: &mut [u8]) -> io::Result<()> {
    let key = 0u32;
    let (key, value) = ((&raw const key) as u64, value.as_mut_ptr() as u64);
    let attribute = Element { map_fd: number(map), key, value, ..Element::default() };
    bpf(BPF_MAP_LOOKUP_ELEM, attribute).map(drop)
}

/// `BPF_F_TEST_XDP_LIVE_FRAMES`.
const LIVE_FRAMES: u32 = 1 << 1;

/// Runs an XDP program over copies of a frame. What it passes goes into the stack, as if it came in
/// on the link of the context. Kernel 5.18 (b530e9e1063e).
pub(super) fn test_run_live(
    program: BorrowedFd<'_>,
    frame: &[u8],
    context: &[u8],
    repeat: u32,
) -> io::Result<()> {
    let [frame_size, context_size] = [frame.len(), context.len()].map(u32::try_from);
    let mut attribute = TestRun {
        prog_fd: number(program),
        data_size_in: frame_size.map_err(io::Error::other)?,
        data_in: frame.as_ptr() as u64,
        repeat,
        ctx_size_in: context_size.map_err(io::Error::other)?,
        ctx_in: context.as_ptr() as u64,
        flags: LIVE_FRAMES,
        ..TestRun::default()
    };
    bpf_with_output(BPF_PROG_TEST_RUN, &mut attribute).map(drop)
}

const BPF_PROG_TYPE_XDP: u32 = 6;

/// Loads an XDP program of these instructions.
pub(super) fn load_xdp(instructions: &[u64]) -> io::Result<OwnedFd> {
    let count = u32::try_from(instructions.len()).map_err(io::Error::other)?;
    let attribute = ProgramLoad {
        prog_type: BPF_PROG_TYPE_XDP,
        insn_cnt: count,
        insns: instructions.as_ptr() as u64,
        license: c"GPL".as_ptr() as u64,
        // As with the programs that it may call.
        expected_attach_type: BPF_XDP,
        ..ProgramLoad::default()
    };
    let fd = bpf(BPF_PROG_LOAD, attribute)?;
    // SAFETY: a new descriptor that nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn number(fd: BorrowedFd<'_>) -> u32 {
    fd.as_raw_fd().cast_unsigned()
}

/// Creates an array of one program, which others call.
pub(super) fn create_program_array(program: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let array = create_small(BPF_MAP_TYPE_PROG_ARRAY)?;
    let (key, value) = (0u32, number(program));
    let (key, value) = ((&raw const key) as u64, (&raw const value) as u64);
    let attribute = Element { map_fd: number(array.as_fd()), key, value, ..Element::default() };
    bpf(BPF_MAP_UPDATE_ELEM, attribute)?;
    Ok(array)
}

/// Creates an array of one word, which is the smallest map.
pub(super) fn create_array() -> io::Result<OwnedFd> {
    create_small(BPF_MAP_TYPE_ARRAY)
}

fn create_small(map_type: u32) -> io::Result<OwnedFd> {
    let attribute = MapCreate { map_type, key_size: 4, value_size: 4, max_entries: 1 };
    let fd = bpf(BPF_MAP_CREATE, attribute)?;
    // SAFETY: a new descriptor that nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Opens the object that is pinned at a path.
pub(super) fn open_pin(path: &Path) -> io::Result<OwnedFd> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let fd = bpf(BPF_OBJ_GET, Obj { pathname: path.as_ptr() as u64, bpf_fd: 0, file_flags: 0 })?;
    // SAFETY: a new descriptor that nothing else owns. `path` lived until the call returned.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Pins an object at a path.
pub(super) fn pin(object: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    bpf(BPF_OBJ_PIN, Obj { pathname: path.as_ptr() as u64, bpf_fd: number(object), file_flags: 0 }).map(drop)
}

fn link_info(link: BorrowedFd<'_>) -> io::Result<LinkInfo> {
    // SAFETY: a plain structure of integers.
    let mut info: LinkInfo = unsafe { zeroed() };
    let info_len = u32::try_from(size_of::<LinkInfo>()).map_err(io::Error::other)?;
    bpf(BPF_OBJ_GET_INFO_BY_FD, InfoByFd { bpf_fd: number(link), info_len, info: (&raw mut info) as u64 })?;
    Ok(info)
}

/// Returns the id of the cgroup that a link is attached to; 0 if it is detached or the cgroup is
/// gone. Kernel 5.8 (f2e10bff16a0).
pub(super) fn link_cgroup(link: BorrowedFd<'_>) -> io::Result<u64> {
    link_info(link).map(|info| u64::from_ne_bytes(first(&info.body)))
}

/// The information about a link of type TCX.
#[derive(Clone, Copy, Debug)]
pub(super) struct TcxLink {
    /// The id of the link.
    pub(super) id: u32,
    /// The id of its program.
    pub(super) program: u32,
    /// The index of its network link; 0 if that is gone.
    pub(super) ifindex: u32,
    /// The hook of the network link.
    pub(super) attach_type: u32,
}

/// Returns the information about a link; `None` if it is not of type TCX. Kernel 6.6
/// (e420bed02507).
pub(super) fn tcx_link(link: BorrowedFd<'_>) -> io::Result<Option<TcxLink>> {
    let info = link_info(link)?;
    let tcx = TcxLink {
        id: info.id,
        program: info.prog_id,
        ifindex: u32::from_ne_bytes(first(&info.body)),
        attach_type: u32::from_ne_bytes(first(&info.body[4..])),
    };
    Ok((info.link_type == BPF_LINK_TYPE_TCX).then_some(tcx))
}

fn first<const N: usize>(bytes: &[u8]) -> [u8; N] {
    bytes.first_chunk().copied().unwrap_or([0; N])
}

/// Returns the time of all runs of a program in nanoseconds, and their number. Both grow only while
/// statistics are enabled. Kernel 5.1 (492ecee892c2).
pub(super) fn program_runs(program: BorrowedFd<'_>) -> io::Result<(u64, u64)> {
    let mut info = ProgramInfo { head: [0; PROGRAM_INFO_HEAD], run_time_ns: 0, runs: 0 };
    let info_len = u32::try_from(size_of::<ProgramInfo>()).map_err(io::Error::other)?;
    let attribute = InfoByFd { bpf_fd: number(program), info_len, info: (&raw mut info) as u64 };
    bpf(BPF_OBJ_GET_INFO_BY_FD, attribute)?;
    Ok((info.run_time_ns, info.runs))
}

/// Attaches a program to a hook of a network link, before all others. Kernel 6.6 (e420bed02507).
pub(super) fn create_tcx_link(
    program: BorrowedFd<'_>,
    target_ifindex: u32,
    attach_type: u32,
) -> io::Result<OwnedFd> {
    let attribute = LinkCreate {
        prog_fd: number(program),
        target_ifindex,
        attach_type,
        flags: BPF_F_BEFORE,
        ..LinkCreate::default()
    };
    create_link(attribute)
}

/// The information about a link of type XDP.
#[derive(Clone, Copy, Debug)]
pub(super) struct XdpLink {
    /// The id of its program.
    pub(super) program: u32,
    /// The index of its network link; 0 if that is gone.
    pub(super) ifindex: u32,
}

/// Returns the information about a link; `None` if it is not of type XDP. Kernel 5.9
/// (c1931c9784eb).
pub(super) fn xdp_link(link: BorrowedFd<'_>) -> io::Result<Option<XdpLink>> {
    let info = link_info(link)?;
    let xdp = XdpLink { program: info.prog_id, ifindex: u32::from_ne_bytes(first(&info.body)) };
    Ok((info.link_type == BPF_LINK_TYPE_XDP).then_some(xdp))
}

/// Attaches a program to the XDP hook of a network link, which has no other. Kernel 5.9
/// (aa8d3a716b59).
pub(super) fn create_xdp_link(
    program: BorrowedFd<'_>,
    target_ifindex: u32,
    flags: u32,
) -> io::Result<OwnedFd> {
    let attribute = LinkCreate {
        prog_fd: number(program),
        target_ifindex,
        attach_type: BPF_XDP,
        flags,
        ..LinkCreate::default()
    };
    create_link(attribute)
}

fn create_link(attribute: LinkCreate) -> io::Result<OwnedFd> {
    let fd = bpf(BPF_LINK_CREATE, attribute)?;
    // SAFETY: a new descriptor that nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Returns the identifier of the BPF link of the system that follows this identifier; `None` after
/// the last one. Needs `CAP_SYS_ADMIN`. Kernel 5.8 (2d602c8cf40d).
pub(super) fn next_link(after: u32) -> io::Result<Option<u32>> {
    let mut attribute = NextId { start: after, next: 0, open_flags: 0 };
    match bpf_with_output(BPF_LINK_GET_NEXT_ID, &mut attribute) {
        Ok(_) => Ok(Some(attribute.next)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// A program on a hook of a network link.
#[derive(Clone, Copy, Debug)]
pub(super) struct TcxProgram {
    /// The id of the program.
    pub(super) program: u32,
    /// The id of its BPF link; 0 if it is attached without one.
    pub(super) link: u32,
}

/// Returns the programs on a hook of a network link in this network namespace, in the order in
/// which they run. Kernel 6.6 (e420bed02507); older kernels return EINVAL.
pub(super) fn tcx_programs(target_ifindex: u32, attach_type: u32) -> io::Result<Vec<TcxProgram>> {
    let mut links = [0u32; MAX_ON_A_HOOK];
    let mut programs = [0u32; MAX_ON_A_HOOK];
    let mut attribute = ProgQuery {
        target_ifindex,
        attach_type,
        prog_ids: programs.as_mut_ptr() as u64,
        count: u32::try_from(MAX_ON_A_HOOK).map_err(io::Error::other)?,
        link_ids: links.as_mut_ptr() as u64,
        ..ProgQuery::default()
    };
    bpf_with_output(BPF_PROG_QUERY, &mut attribute)?;
    let found = programs.into_iter().zip(links).take(attribute.count as usize);
    Ok(found.map(|(program, link)| TcxProgram { program, link }).collect())
}

/// Detaches a link at once. Removing its pin would detach it only some time later. Kernel 5.9
/// (73b11c2ab072).
pub(super) fn detach_link(link: BorrowedFd<'_>) -> io::Result<()> {
    bpf(BPF_LINK_DETACH, LinkDetach { link_fd: number(link) }).map(drop)
}

/// Replaces the program of a link without a gap. Kernel 5.7 (0c991ebc8c69).
pub(super) fn update_link(link: BorrowedFd<'_>, program: BorrowedFd<'_>) -> io::Result<()> {
    bpf(
        BPF_LINK_UPDATE,
        LinkUpdate { link_fd: number(link), new_prog_fd: number(program), flags: 0, old_prog_fd: 0 },
    )
    .map(drop)
}

/// Runs a program over a frame and its context, and overwrites both with the result. Returns what
/// the program returned. The frame may not grow. An empty context is that of the kernel.
pub(super) fn test_run(
    program: BorrowedFd<'_>,
    frame: &mut Vec<u8>,
    context: &mut [u8],
    flags: u32,
) -> io::Result<u32> {
    let [frame_size, context_size] = [frame.len(), context.len()].map(u32::try_from);
    let [frame_size, context_size] =
        [frame_size.map_err(io::Error::other)?, context_size.map_err(io::Error::other)?];
    let mut attribute = TestRun {
        prog_fd: number(program),
        data_size_in: frame_size,
        data_size_out: frame_size,
        data_in: frame.as_ptr() as u64,
        data_out: frame.as_mut_ptr() as u64,
        repeat: 1,
        ctx_size_in: context_size,
        ctx_size_out: context_size,
        ctx_in: if context.is_empty() { 0 } else { context.as_ptr() as u64 },
        ctx_out: if context.is_empty() { 0 } else { context.as_mut_ptr() as u64 },
        flags,
        ..TestRun::default()
    };
    bpf_with_output(BPF_PROG_TEST_RUN, &mut attribute)?;
    frame.truncate(attribute.data_size_out as usize);
    Ok(attribute.retval)
}
