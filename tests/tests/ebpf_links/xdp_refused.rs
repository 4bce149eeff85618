//! Links that cannot have the XDP program: one that has a program of others, and one whose driver
//! refuses it. The link programs serve them.

use proxy_userspace::{
    dataplane::ebpf::LinkAttachment,
    kernel::bpf::{
        live_frames::{Fate, SameForAll},
        tc::Hook,
    },
    model::XdpMode,
};

use crate::bench::{Bench, run};

const LINK: &str = "v0";
const PEER: &str = "v1";

/// Returns links with programs for traffic control.
fn bench() -> Bench {
    let mut bench = Bench::new(LinkAttachment::Probe);
    bench.add_veth(LINK, PEER);
    bench.sync();
    bench
}

/// Attaches shunt's XDP program in this mode, if the link takes it.
fn attach(bench: &mut Bench, mode: XdpMode) {
    bench.attach_xdp(LINK, mode);
    assert!(!bench.programs(LINK, Hook::Ingress).is_empty(), "the link programs stay");
}

/// Returns what `ip` says of the link's XDP program. Empty if there is none.
fn xdp() -> String {
    let shown = run("ip", &["-details", "link", "show", "dev", LINK]);
    shown.lines().filter(|line| line.contains("prog/xdp")).collect()
}

#[test]
fn program_of_others_stays_and_shunts_comes_once_it_is_gone() {
    let mut bench = bench();
    let others = SameForAll::attach(bench.index(LINK), Fate::Pass).expect("a veth takes a program");
    let before = xdp();
    assert!(!before.is_empty());
    for mode in [XdpMode::Generic, XdpMode::Native] {
        attach(&mut bench, mode);
        assert_eq!(xdp(), before, "{mode:?}");
    }
    drop(others);
    assert_eq!(xdp(), "");
    attach(&mut bench, XdpMode::Generic);
    assert!(xdp().contains("shunt_xdp"), "{}", xdp());
}

/// A veth takes no program while frames of its peer may need several buffers.
#[test]
fn driver_that_refuses_the_program_is_asked_again() {
    let mut bench = bench();
    let set_mtu = |mtu| drop(run("ip", &["link", "set", "dev", PEER, "mtu", mtu]));
    set_mtu("65535");
    attach(&mut bench, XdpMode::Native);
    assert_eq!(xdp(), "");
    set_mtu("1500");
    attach(&mut bench, XdpMode::Native);
    assert!(xdp().contains("shunt_xdp"), "{}", xdp());
}
