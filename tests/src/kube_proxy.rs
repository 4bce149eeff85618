//! kube-proxy's rules, for tests of a node that goes back to it.

/// The name of a chain of kube-proxy's Service.
pub const SERVICE_CHAIN: &str = "service-UEU3GDQ7-default/web/tcp/";

/// Returns what kube-proxy writes into its tables in the nftables mode when it starts, for nft.
pub fn nftables_rules() -> String {
    let v4 = include_str!("kube_proxy.nft");
    let v6 = v4
        .replace(" ip ", " ip6 ")
        .replace("ipv4_addr", "ipv6_addr")
        .replace("__10.244.9.9/", "__fd44..9/")
        .replace("10.244.9.9:8080", "[fd44::9]:8080")
        .replace("10.96.0.80", "fd96::80");
    format!("{v4}{v6}")
}
