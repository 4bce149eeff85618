//! The modes: shunt's ways of programming the kernel.
#![forbid(unsafe_code)]

use std::fmt;

/// When the ebpf mode keeps a backstop: the rules of a netfilter mode beneath its programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum BackstopPolicy {
    /// While something needs it.
    Auto,
    /// Always.
    Always,
    /// Never. What the programs cannot translate is not served.
    Never,
}

impl BackstopPolicy {
    /// All policies.
    pub const ALL: [Self; 3] = [Self::Auto, Self::Always, Self::Never];

    /// The name in flags and files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Always => "always",
            Self::Never => "never",
        }
    }
}

/// A way of programming the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// eBPF programs on sockets and links.
    Ebpf,
    /// nftables rules.
    Nftables,
    /// iptables rules.
    Iptables,
    /// IPVS, the kernel's virtual server.
    Ipvs,
}

impl Mode {
    /// All modes, in the order in which `auto` prefers them.
    pub const ALL: [Self; 4] = [Self::Ebpf, Self::Nftables, Self::Iptables, Self::Ipvs];

    /// The name in flags and files, in logs and metrics, and in the answer of `/proxyMode`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ebpf => "ebpf",
            Self::Nftables => "nftables",
            Self::Iptables => "iptables",
            Self::Ipvs => "ipvs",
        }
    }

    /// Returns true if `auto` may choose this mode. It never chooses ipvs, which upstream
    /// deprecates.
    pub const fn is_for_auto(self) -> bool {
        !matches!(self, Self::Ipvs)
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
