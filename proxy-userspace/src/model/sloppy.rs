//! Parses addresses like kube-proxy, which accepts more than the standard library.

use std::{fmt::Write as _, net::IpAddr};

use ipnet::IpNet;

/// Parses an IP address like upstream's `netutils.ParseIPSloppy`: leading zeros of IPv4 are ignored
/// (`10.0.0.011` is 10.0.0.11). IPv4-mapped IPv6 becomes IPv4.
pub fn parse_ip_sloppy(value: &str) -> Option<IpAddr> {
    let address: IpAddr = value.parse().ok().or_else(|| without_leading_zeros(value)?.parse().ok())?;
    Some(address.to_canonical())
}

/// Parses a CIDR like [`parse_ip_sloppy`], and clears its host bits.
pub fn parse_cidr_sloppy(value: &str) -> Option<IpNet> {
    let (address, prefix) = value.split_once('/')?;
    if prefix.is_empty() || !prefix.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let written: IpAddr = address.parse().ok().or_else(|| without_leading_zeros(address)?.parse().ok())?;
    let prefix: u8 = prefix.parse().ok()?;
    let canonical = written.to_canonical();
    // ::ffff:10.0.0.0/104 is 10.0.0.0/8.
    let mapped_bits = if written.is_ipv6() && canonical.is_ipv4() { 96 } else { 0 };
    Some(IpNet::new(canonical, prefix.checked_sub(mapped_bits)?).ok()?.trunc())
}

fn without_leading_zeros(value: &str) -> Option<String> {
    let mut stripped = String::new();
    for (i, part) in value.split('.').enumerate() {
        let number: u8 = part.bytes().all(|byte| byte.is_ascii_digit()).then(|| part.parse().ok())??;
        let dot = if i == 0 { "" } else { "." };
        write!(stripped, "{dot}{number}").ok()?;
    }
    Some(stripped)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leading_zeros_are_ignored_and_mapped_addresses_become_ipv4() {
        let ip = |text: &str| parse_ip_sloppy(text).map(|ip| ip.to_string());
        assert_eq!(ip("010.0.0.011").as_deref(), Some("10.0.0.11"));
        assert_eq!(ip("::ffff:1.2.3.4").as_deref(), Some("1.2.3.4"));
        assert_eq!(ip("10.0.0.256"), None);
        let cidr = |text: &str| parse_cidr_sloppy(text).map(|cidr| cidr.to_string());
        assert_eq!(cidr("010.1.2.3/08").as_deref(), Some("10.0.0.0/8"));
        assert_eq!(cidr("::ffff:10.0.0.0/104").as_deref(), Some("10.0.0.0/8"));
        assert_eq!(cidr("10.0.0.0/33"), None);
    }
}
