//! Counts the connections of IPVS, and lists its persistent clients. Reads the kernel's file
//! (`ip_vs_conn_seq_show` of `net/netfilter/ipvs/ip_vs_conn.c`).

use std::{
    fs::File,
    io::{self, BufRead as _, BufReader},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use super::VirtualKey;
use crate::{kernel::KernelError, net::Protocol};

/// The connections of the calling thread's network namespace.
const PATH: &str = "/proc/thread-self/net/ip_vs_conn";

/// Counts the current connections to the selected virtual servers. Persistence templates do not
/// count.
pub fn connections_to(is_selected: &dyn Fn(&VirtualKey) -> bool) -> Result<usize, KernelError> {
    let mut count = 0;
    for_each_line(|line| count += usize::from(virtual_server(line).is_some_and(|key| is_selected(&key))))?;
    Ok(count)
}

/// A client whose next connection to a virtual server goes to the same real server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Persistence {
    /// The address of the client.
    pub client: IpAddr,
    /// The virtual server.
    pub server: VirtualKey,
    /// The real server.
    pub real: SocketAddr,
    /// The time until the kernel forgets it.
    pub expires_after: Duration,
}

/// Returns the persistence templates. None if the kernel has no IPVS.
pub fn persistent_clients() -> Result<Vec<Persistence>, KernelError> {
    let mut found = Vec::new();
    for_each_line(|line| found.extend(persistence(line)))?;
    Ok(found)
}

fn for_each_line(mut each: impl FnMut(&str)) -> Result<(), KernelError> {
    let mut read = || -> io::Result<()> {
        let file = match File::open(PATH) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            file => BufReader::new(file?),
        };
        file.lines().try_for_each(|line| {
            each(&line?);
            Ok(())
        })
    };
    read().map_err(KernelError::path("read", PATH))
}

/// Returns the persistence template in a line.
pub(in crate::kernel) fn persistence(line: &str) -> Option<Persistence> {
    let words: Vec<&str> = line.split_ascii_whitespace().collect();
    let [protocol, client, "0000", address, port, real, real_port, _, expires, ..] = words[..] else {
        return None;
    };
    let protocol = Protocol::ALL.into_iter().find(|known| known.name() == protocol)?;
    let socket =
        |address, port| Some(SocketAddr::new(read_address(address)?, u16::from_str_radix(port, 16).ok()?));
    Some(Persistence {
        client: read_address(client)?,
        server: VirtualKey { protocol, address: socket(address, port)? },
        real: socket(real, real_port)?,
        expires_after: Duration::from_secs(expires.parse().ok()?),
    })
}

/// Returns the virtual server of the connection in a line. Returns `None` for headings and for
/// persistence templates.
pub(in crate::kernel) fn virtual_server(line: &str) -> Option<VirtualKey> {
    let mut words = line.split_ascii_whitespace();
    let word = words.next()?;
    let protocol = Protocol::ALL.into_iter().find(|protocol| protocol.name() == word)?;
    let [_client, client_port, address, port] = [words.next()?, words.next()?, words.next()?, words.next()?];
    let number = |text| u16::from_str_radix(text, 16).ok();
    // A persistence template has no client port.
    (number(client_port)? != 0).then_some(())?;
    Some(VirtualKey { protocol, address: SocketAddr::new(read_address(address)?, number(port)?) })
}

/// Reads eight hexadecimal digits, or an IPv6 address.
fn read_address(text: &str) -> Option<IpAddr> {
    if text.contains(':') {
        return text.trim_matches(['[', ']']).parse::<Ipv6Addr>().ok().map(IpAddr::from);
    }
    u32::from_str_radix(text, 16).ok().map(|bits| Ipv4Addr::from_bits(bits).into())
}

/// Returns true if this kernel has IPVS, built in or as a module that is loaded.
pub fn is_loaded() -> bool {
    std::path::Path::new("/proc/thread-self/net/ip_vs").exists()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headings_and_persistence_templates_are_no_connections() {
        let key = |protocol, address: &str| {
            Some(VirtualKey { protocol, address: address.parse().expect("an address") })
        };
        for (line, expected) in [
            ("Pro FromIP   FPrt ToIP     TPrt DestIP   DPrt State       Expires PEName PEData", None),
            (
                "TCP C0A83932 9C5E 0A602A01 0050 0AF4010B 1F90 ESTABLISHED     899",
                key(Protocol::Tcp, "10.96.42.1:80"),
            ),
            ("TCP C0A83932 0000 0A602A01 0050 0AF4010B 1F90 NONE            899", None),
            (
                "UDP fd57:0000:0000:0000:0000:0000:0000:0050 9C5E fd96:0000:0000:0000:0000:0000:0000:4201 0035 fd44:0001:0000:0000:0000:0000:0000:0011 14E9 UDP 299",
                key(Protocol::Udp, "[fd96::4201]:53"),
            ),
        ] {
            assert_eq!(virtual_server(line), expected, "{line}");
        }
    }

    #[test]
    fn a_persistence_template_has_client_and_real_server_and_connections_are_none() {
        let socket = |text: &str| text.parse::<SocketAddr>().expect("an address");
        let line = "TCP C0A83932 0000 0A602A01 0050 0AF4010B 1F90 ASSURED           899";
        let expected = Persistence {
            client: socket("192.168.57.50:0").ip(),
            server: VirtualKey { protocol: Protocol::Tcp, address: socket("10.96.42.1:80") },
            real: socket("10.244.1.11:8080"),
            expires_after: Duration::from_secs(899),
        };
        assert_eq!(persistence(line), Some(expected));
        for line in [
            "Pro FromIP   FPrt ToIP     TPrt DestIP   DPrt State       Expires PEName PEData",
            "TCP C0A83932 9C5E 0A602A01 0050 0AF4010B 1F90 ESTABLISHED     899",
            "",
        ] {
            assert_eq!(persistence(line), None, "{line}");
        }
    }
}
