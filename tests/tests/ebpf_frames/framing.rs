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
    testing::{Addresses, TestNode, TestPacket},
};
use proxy_userspace::kernel::bpf::test_run::TestFrame;
use rtnetlink::LinkUnspec;

use crate::kernel::Kernel;

pub(crate) const TESTS: &[(&str, fn())] = &[
    ("framing::packets_without_an_ethernet_header_are_translated", in_a_network_namespace),
    (
        "framing::programs_leave_packets_of_the_other_framing_alone",
        programs_leave_packets_of_the_other_framing_alone,
    ),
];

/// The kernel takes the first 14 bytes of a test frame for an Ethernet header. A program for bare
/// IP packets sees the same bytes as the beginning of the packet. The kernel reads the protocol
/// from the last two of them, which are in the source address. The first six must be the address of
/// lo, so that the packet is for this host.
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

fn in_a_network_namespace() {
    // The network namespace ends with the thread.
    let result = thread::spawn(packets_without_an_ethernet_header_are_translated).join();
    result.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}

fn packets_without_an_ethernet_header_are_translated() {
    unshare(CloneFlags::CLONE_NEWNET).expect("root may make network namespaces");
    for (addresses, [client, service, pod]) in Addresses::BOTH.into_iter().zip(ADDRESSES) {
        let [client, vip, endpoint] = [(client, 40_000), (service, 80), (pod, 8080)].map(SocketAddr::from);
        let mut kernel = Kernel::lock();
        TestNode::new(&mut *kernel, addresses).add_service(Protocol::Tcp, &[vip], &[endpoint]);
        // With one word of options, an IPv4 packet begins like a unicast Ethernet address.
        let options = if client.is_ipv4() { vec![1; 4] } else { Vec::new() };
        let syn = TestPacket { options, ..TestPacket::tcp(TcpFlags::SYN_ALONE, client, vip) };
        let output = run(&mut kernel, "shunt_in_ip", &syn);
        assert_eq!(output, (Some(Outcome::Proceed), syn.to_ip_packet()), "it is not for this host");
        set_address_of_lo(&syn.to_ip_packet()[..6]);
        let output = run(&mut kernel, "shunt_in_ip", &syn);
        assert_eq!(output, (Some(Outcome::Proceed), syn.clone().to(endpoint).to_ip_packet()));
        let reply = syn.to(endpoint).reversed().flags(TcpFlags::SYN_ACK);
        let output = run(&mut kernel, "shunt_out_ip", &reply);
        assert_eq!(output, (Some(Outcome::Proceed), reply.from(vip).to_ip_packet()));
    }
}

fn programs_leave_packets_of_the_other_framing_alone() {
    let [client, vip] = [(ADDRESSES[0][0], 40_000), (ADDRESSES[0][1], 80)].map(SocketAddr::from);
    let mut kernel = Kernel::lock();
    TestNode::new(&mut *kernel, Addresses::BOTH[0]).add_service(Protocol::Tcp, &[vip], &[client]);
    let syn = TestPacket::tcp(TcpFlags::SYN_ALONE, client, vip);
    for (name, bytes) in [
        ("shunt_in_ip", syn.to_frame()),
        ("shunt_out_ip", syn.to_frame()),
        ("shunt_out_eth", syn.to_ip_packet()),
    ] {
        let mut frame = TestFrame { bytes: bytes.clone(), ..TestFrame::default() };
        assert_eq!(kernel.run_program(name, &mut frame), Some(Outcome::Proceed), "{name}");
        assert_eq!(frame.bytes, bytes, "{name}");
    }
}

fn run(kernel: &mut Kernel, program: &str, packet: &TestPacket) -> (Option<Outcome>, Vec<u8>) {
    let mut frame = TestFrame { bytes: packet.to_ip_packet(), ..TestFrame::default() };
    (kernel.run_program(program, &mut frame), frame.bytes)
}

/// Changes the address of lo, which is down in a new network namespace.
fn set_address_of_lo(address: &[u8]) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
    runtime.block_on(async {
        let (connection, handle, _) = rtnetlink::new_connection().expect("netlink");
        tokio::spawn(connection);
        let lo = LinkUnspec::new_with_index(1).address(address.to_vec()).build();
        handle.link().set(lo).execute().await.expect("lo accepts any unicast address");
    });
}
