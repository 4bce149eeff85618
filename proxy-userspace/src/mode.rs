//! The modes: shunt's ways of programming the kernel.
#![forbid(unsafe_code)]

use std::fmt;

/// Declares the values of a setting, with their names in flags and files.
macro_rules! setting {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $text:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
        #[serde(rename_all = "lowercase")]
        pub enum $name {
            $($(#[$variant_doc])* $variant,)*
        }

        impl $name {
            /// The names of all values.
            pub const NAMES: &[&str] = &[$($text),*];

            /// Returns the value with this name.
            pub fn from_name(name: &str) -> Option<Self> {
                match name {
                    $($text => Some(Self::$variant),)*
                    _ => None,
                }
            }
        }
    };
}

setting! {
    /// When the ebpf mode keeps a backstop: the rules of a netfilter mode beneath its programs.
    BackstopPolicy {
        /// While something needs it.
        Auto = "auto",
        /// Always.
        Always = "always",
        /// Never. What the programs cannot translate is not served.
        Never = "never",
    }
}

setting! {
    /// What translates the packets that come in on links, in the ebpf mode.
    LinksPath {
        /// The programs, where nothing on the node could notice the difference; otherwise
        /// netfilter.
        Auto = "auto",
        /// The programs. Packets go through the stack.
        Programs = "programs",
        /// The programs. Packets of flows that they learned leave on another link at once.
        Direct = "direct",
        /// Netfilter: the rules of the backstop.
        Netfilter = "netfilter",
    }
}

setting! {
    /// Which packets take the direct path, where flows take it.
    LinksDirect {
        /// Those that are as the ones that went through the stack before.
        Learned = "learned",
        /// All, from the first one of a flow on.
        Whole = "whole",
    }
}

setting! {
    /// What masquerades packets that come in on links, in the ebpf mode.
    LinksMasquerade {
        /// The programs on a node with the direct path, otherwise netfilter.
        Auto = "auto",
        /// Netfilter, with conntrack.
        Netfilter = "netfilter",
        /// The programs.
        Programs = "programs",
    }
}

setting! {
    /// Which links have an XDP program for flows on the direct path.
    LinksXdp {
        /// None.
        Off = "off",
        /// Devices whose drivers say that they can.
        Auto = "auto",
        /// All, in the kernel.
        Generic = "generic",
        /// All, in the driver.
        Native = "native",
    }
}

setting! {
    /// The way of the packets that endpoints of this node send to clients, for Services with direct
    /// server return.
    DsrReturn {
        /// The network brings them to the client.
        Direct = "direct",
        /// Through the tunnel, to the node that the client reached.
        Tunnel = "tunnel",
    }
}

setting! {
    /// The sockets that the ebpf mode serves.
    SocketsScope {
        /// All sockets but those of pods that redirect their own packets.
        Auto = "auto",
        /// All sockets.
        All = "all",
        /// The sockets of processes in the node's network namespace.
        Node = "node",
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

    /// The mode that `auto` prefers.
    pub const PREFERRED: Self = Self::ALL[0];

    /// The name in flags and files, in logs and metrics, and in the answer of `/proxyMode`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ebpf => "ebpf",
            Self::Nftables => "nftables",
            Self::Iptables => "iptables",
            Self::Ipvs => "ipvs",
        }
    }

    /// Returns the mode with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|mode| mode.name() == name)
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
