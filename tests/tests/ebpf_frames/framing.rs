//! Links without Ethernet headers: the programs for bare IP packets.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    thread,
};

use nix::sched::{CloneFlags, unshare};
use proxy_common::{
    Protocol,
    link::Outcome,
    packet::TcpFlags,
    testing::{Places, Scene, Sent},
};
use proxy_userspace::kernel::bpf::test_run::TestFrame;
use rtnetlink::LinkUnspec;

use crate::kernel::Kernel;

pub(crate) const TESTS: &[(&str, fn())] = &[
    ("framing::packets_without_an_ethernet_header_are_translated", in_a_namespace),
    ("framing::each_framing_has_its_own_program", frames_of_the_other_framing_are_left_alone),
];

/// The kernel takes the first 14 bytes of any test frame for an Ethernet header, and a program for bare packets then sees them
/// as the beginning of the packet. It tells the protocol by the last two of them, which are in the source, and that the
/// packet is for this host by the first six, which must be the address of lo.
const ADDRESSES: [[IpAddr; 3]; 2] = [
    [
        IpAddr::V4(Ipv4Addr::new(8, 0, 2, 50)),
        IpAddr::V4(Ipv4Addr::new(10, 96, 0, 10)),
        IpAddr::V4(Ipv4Addr::new(8, 0, 1, 11)),
    ],
    [
        IpAddr::V6(Ipv6Addr::new(0xfd57, 0, 0x86dd, 0, 0, 0, 0, 0x50)),
        IpAddr::V6(Ipv6Addr::new(0xfd96, 0, 0, 0, 0, 0, 0, 0x10)),
        IpAddr::V6(Ipv6Addr::new(0xfd44, 1, 0x86dd, 0, 0, 0, 0, 0x11)),
    ],
];

fn in_a_namespace() {
    // The namespace ends with the thread.
    let played = thread::spawn(packets_without_an_ethernet_header_are_translated).join();
    played.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}

fn packets_without_an_ethernet_header_are_translated() {
    unshare(CloneFlags::CLONE_NEWNET).expect("root may make network namespaces");
    for (places, [client, service, pod]) in Places::BOTH.into_iter().zip(ADDRESSES) {
        let [client, vip, endpoint] = [(client, 40_000), (service, 80), (pod, 8080)].map(SocketAddr::from);
        let mut kernel = Kernel::lock();
        Scene::new(&mut *kernel, places).serve(Protocol::Tcp, &[vip], &[endpoint]);
        // With one word of options, an IPv4 packet begins like an address that is none of a group.
        let options = if client.is_ipv4() { vec![1; 4] } else { Vec::new() };
        let syn = Sent { options, ..Sent::tcp(TcpFlags::SYN_ALONE, client, vip) };
        let stranger = run(&mut kernel, "shunt_in_ip", &syn);
        assert_eq!(stranger, (Some(Outcome::Proceed), syn.packet()), "it is not for this host");
        set_address_of_lo(&syn.packet()[..6]);
        let came = run(&mut kernel, "shunt_in_ip", &syn);
        assert_eq!(came, (Some(Outcome::Proceed), syn.clone().to(endpoint).packet()));
        let answer = syn.to(endpoint).reversed().flags(TcpFlags::SYN_ACK);
        let came = run(&mut kernel, "shunt_out_ip", &answer);
        assert_eq!(came, (Some(Outcome::Proceed), answer.from(vip).packet()));
    }
}

fn frames_of_the_other_framing_are_left_alone() {
    let [client, vip] = [(ADDRESSES[0][0], 40_000), (ADDRESSES[0][1], 80)].map(SocketAddr::from);
    let mut kernel = Kernel::lock();
    Scene::new(&mut *kernel, Places::BOTH[0]).serve(Protocol::Tcp, &[vip], &[client]);
    let syn = Sent::tcp(TcpFlags::SYN_ALONE, client, vip);
    for (name, bytes) in
        [("shunt_in_ip", syn.bytes()), ("shunt_out_ip", syn.bytes()), ("shunt_out_eth", syn.packet())]
    {
        let mut frame = TestFrame { bytes: bytes.clone(), ..TestFrame::default() };
        assert_eq!(kernel.run_program(name, &mut frame), Some(Outcome::Proceed), "{name}");
        assert_eq!(frame.bytes, bytes, "{name}");
    }
}

fn run(kernel: &mut Kernel, program: &str, sent: &Sent) -> (Option<Outcome>, Vec<u8>) {
    let mut frame = TestFrame { bytes: sent.packet(), ..TestFrame::default() };
    (kernel.run_program(program, &mut frame), frame.bytes)
}

/// It may be changed while it is down, as it is in a new namespace.
fn set_address_of_lo(address: &[u8]) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
    runtime.block_on(async {
        let (connection, handle, _) = rtnetlink::new_connection().expect("netlink");
        tokio::spawn(connection);
        let lo = LinkUnspec::new_with_index(1).address(address.to_vec()).build();
        handle.link().set(lo).execute().await.expect("lo takes any address of a host");
    });
}
