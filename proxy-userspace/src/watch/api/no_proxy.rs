//! The list of servers in `NO_PROXY`, as Go's `httpproxy` reads it.

use std::net::IpAddr;

use ipnet::IpNet;

/// Returns true if a server is reached without the proxy of the environment. `host` is a name, or
/// an IP address, in brackets for IPv6. Names are not resolved. Loopback addresses and `localhost`
/// never have a proxy.
///
/// Unlike Go, this does not convert names with other letters than ASCII: write them as `xn--…`.
pub(super) fn is_exempt(no_proxy: &str, host: &str, port: u16) -> bool {
    let host = host.trim_start_matches('[').trim_end_matches(']').to_lowercase();
    let ip = host.parse().ok().map(|ip: IpAddr| ip.to_canonical());
    let server = Server { host: &host, ip, port };
    host == "localhost"
        || ip.is_some_and(|ip| ip.is_loopback())
        || no_proxy.split(',').any(|entry| server.matches(&entry.trim().to_lowercase()))
}

struct Server<'a> {
    host: &'a str,
    /// The host, if it is an address.
    ip: Option<IpAddr>,
    port: u16,
}

impl Server<'_> {
    fn matches(&self, entry: &str) -> bool {
        if entry == "*" {
            return true;
        }
        if let Ok(network) = entry.parse::<IpNet>() {
            return self.ip.is_some_and(|ip| network.contains(&ip));
        }
        let (name, port) = split_port(entry);
        if name.is_empty() || port.is_some_and(|port| port.parse() != Ok(self.port)) {
            return false;
        }
        match (name.parse(), self.ip) {
            (Ok(address), ip) => ip == Some(IpAddr::to_canonical(&address)),
            // "1.example.com" is not a part of the address fe80::%1.example.com (CVE-2025-22870).
            (Err(_), Some(_)) => false,
            (Err(_), None) => self.is_in_domain(name),
        }
    }

    /// `example.com` has itself and its subdomains. `.example.com` and `*.example.com` have only
    /// the subdomains.
    fn is_in_domain(&self, name: &str) -> bool {
        let parent = name.strip_prefix("*.").or_else(|| name.strip_prefix('.'));
        let is_subdomain_of = |domain| self.host.strip_suffix(domain).is_some_and(|head| head.ends_with('.'));
        parent.map_or_else(|| self.host == name || is_subdomain_of(name), is_subdomain_of)
    }
}

/// Splits `name:port` and `[IPv6]:port`. An IPv6 address without brackets has no port.
fn split_port(entry: &str) -> (&str, Option<&str>) {
    let split = match entry.strip_prefix('[') {
        Some(rest) => rest.split_once("]:"),
        None => entry.split_once(':').filter(|(_, port)| !port.contains(':')),
    };
    split.map_or((entry, None), |(name, port)| (name, Some(port).filter(|port| !port.is_empty())))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The list and the cases of Go's `TestUseProxy`. Each server has port 80.
    const LIST: &str = "foobar.com, .barbaz.net, *.wildcard.io, 192.168.1.1, 192.168.1.2:81, 192.168.1.3:80, \
        10.0.0.0/30, 2001:db8::52:0:1, [2001:db8::52:0:2]:443, [2001:db8::52:0:3]:80, 2002:db8:a::45/64";
    const HOSTS: [(&str, bool); 27] = [
        ("localhost", true),
        ("127.0.0.1", true),
        ("127.0.0.2", true),
        ("[::1]", true),
        ("[::2]", false),
        ("192.168.1.1", true),
        ("192.168.1.2", false),
        ("192.168.1.3", true),
        ("192.168.1.4", false),
        ("10.0.0.2", true),
        ("[2001:db8::52:0:1]", true),
        ("[2001:db8::52:0:2]", false),
        ("[2001:db8::52:0:3]", true),
        ("[2002:db8:a::123]", true),
        ("[fe80::424b:c8be:1643:a1b6]", false),
        ("barbaz.net", false),
        ("www.barbaz.net", true),
        ("foobar.com", true),
        ("www.foobar.com", true),
        ("foofoobar.com", false),
        ("baz.com", false),
        ("localhost.net", false),
        ("local.localhost", false),
        ("barbarbaz.net", false),
        ("wildcard.io", false),
        ("nested.wildcard.io", true),
        ("awildcard.io", false),
    ];

    #[test]
    fn servers_match_the_list_as_in_go() {
        for (host, expected) in HOSTS {
            assert_eq!(is_exempt(LIST, host, 80), expected, "{host}");
            assert!(is_exempt("*", host, 80) && is_exempt("a.test, *", host, 80), "{host}");
        }
    }

    #[test]
    fn entries_may_have_blanks_capitals_ports_and_be_empty() {
        let cases = [
            ("", "example.com", 443, false),
            (" , ,", "example.com", 443, false),
            (":1", "example.com", 1, false),
            ("ample.com", "example.com", 443, false),
            (" Example.COM ", "API.example.com", 443, true),
            ("example.com:6443", "example.com", 6443, true),
            ("example.com:6443", "example.com", 443, false),
            ("example.com:", "example.com", 443, true),
            (".example.com:6443", "api.example.com", 6443, true),
            ("*.example.com:6443", "api.example.com", 443, false),
            ("10.96.0.0/12,.svc,.cluster.local", "10.96.0.1", 443, true),
            ("10.96.0.0/12,.svc,.cluster.local", "kubernetes.default.svc", 443, true),
            ("10.96.0.0/33", "10.96.0.1", 443, false),
            ("10.0.0.1", "[::ffff:10.0.0.1]", 443, true),
            ("10.0.0.0/8", "[::ffff:10.0.0.1]", 443, true),
            (".1", "10.0.0.1", 443, false),
            ("0.1", "10.0.0.1", 443, false),
        ];
        for (list, host, port, expected) in cases {
            assert_eq!(is_exempt(list, host, port), expected, "{list:?} {host}:{port}");
        }
    }
}
