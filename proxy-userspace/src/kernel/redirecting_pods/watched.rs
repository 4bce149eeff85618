//! One network namespace, with what makes checking it cheap: open sockets and files in it.

use std::{
    collections::BTreeSet,
    net::IpAddr,
    os::fd::{AsFd, BorrowedFd},
    path::{Path, PathBuf},
};

use super::{
    ExemptNamespace, NetnsInode,
    legacy::LegacyTables,
    namespaces::{self, Finder},
    nftables::{self, Notifications},
};
use crate::kernel::{
    KernelError,
    netns::{self, NetnsCookie},
};

/// A network namespace whose rules are known. The namespace exists as long as this value.
#[derive(Debug)]
pub(super) struct Watched {
    inode: NetnsInode,
    pub(super) path: PathBuf,
    cookie: Option<NetnsCookie>,
    host_name: Option<String>,
    /// The addresses inside, if this namespace redirects or did.
    addresses: BTreeSet<IpAddr>,
    /// The number of calls after which the addresses are read again.
    calls_until_read: u8,
    notifications: Notifications,
    /// There are notifications to read.
    pub(super) is_notified: bool,
    /// The nftables rules changed since they were listed.
    is_outdated: bool,
    legacy: LegacyTables,
    redirects: Redirects,
}

/// Which rules redirect.
#[derive(Clone, Copy, Debug)]
struct Redirects {
    nftables: bool,
    legacy: bool,
}

impl Watched {
    /// Enters the namespace and checks it. Returns `None` if it has disappeared.
    pub(super) fn open(inode: NetnsInode, path: &Path) -> Result<Option<Self>, KernelError> {
        let Some(file) = namespaces::open(inode, path) else { return Ok(None) };
        netns::within(path, &file, || {
            // From here on no change is missed: the rules are listed after the subscription.
            let notifications = Notifications::subscribe()?;
            let legacy = LegacyTables::open();
            Ok(Some(Self {
                inode,
                path: path.to_owned(),
                cookie: netns::current_cookie()?,
                host_name: None,
                addresses: BTreeSet::new(),
                calls_until_read: 0,
                notifications,
                is_notified: false,
                is_outdated: false,
                redirects: Redirects { nftables: nftables::redirects()?, legacy: legacy.redirect() },
                legacy,
            }))
        })
    }

    /// Becomes readable when nftables rules change.
    pub(super) fn notifications(&self) -> BorrowedFd<'_> {
        self.notifications.socket.as_fd()
    }

    /// Reads the notifications, and lists the nftables rules if they changed, or if listing them
    /// failed the last time. `datagram` has the capacity for the largest datagram.
    pub(super) fn check_nftables(&mut self, datagram: &mut Vec<u8>) -> Result<(), KernelError> {
        if std::mem::take(&mut self.is_notified) {
            self.is_outdated |= self.notifications.have_changes(datagram)?;
        }
        if self.is_outdated
            && let Some(file) = namespaces::open(self.inode, &self.path)
        {
            self.redirects.nftables = netns::within(&self.path, &file, nftables::redirects)?;
            self.is_outdated = false;
        }
        Ok(())
    }

    /// Checks the legacy iptables rules. `is_loaded` is what [`super::legacy::loaded_families`]
    /// returns.
    pub(super) fn check_legacy(&mut self, is_loaded: [bool; 2]) -> Result<(), KernelError> {
        self.legacy.read_names();
        if self.legacy.are_missing(is_loaded)
            && let Some(file) = namespaces::open(self.inode, &self.path)
        {
            let legacy = &mut self.legacy;
            netns::within(&self.path, &file, || {
                legacy.open_missing();
                // A module that was loaded just now can have tables already.
                legacy.read_names();
                legacy.open_missing();
                Ok(())
            })?;
        }
        self.redirects.legacy = self.legacy.redirect();
        Ok(())
    }

    /// Reads the addresses if the namespace redirects: in the first of this many calls.
    pub(super) fn read_addresses(&mut self) -> Result<(), KernelError> {
        const CALLS: u8 = 16;
        if !self.redirects() {
            self.calls_until_read = 0;
        } else if self.calls_until_read > 0 {
            self.calls_until_read -= 1;
        } else if let Some(file) = namespaces::open(self.inode, &self.path) {
            self.addresses = netns::within(&self.path, &file, netns::addresses)?;
            self.calls_until_read = CALLS - 1;
        }
        Ok(())
    }

    /// Finds the host name, if it is needed and not known.
    pub(super) fn find_host_name(&mut self, finder: &Finder) {
        if self.redirects() && self.host_name.is_none() {
            self.host_name = finder.host_name(self.inode);
        }
    }

    /// Returns how to report this namespace, if it redirects its own outgoing packets.
    pub(super) fn exempt(&self) -> Option<ExemptNamespace> {
        self.redirects().then(|| ExemptNamespace {
            cookie: self.cookie,
            host_name: self.host_name.clone(),
            path: self.path.clone(),
        })
    }

    /// Returns the addresses inside, if this namespace redirects or did.
    pub(super) const fn addresses(&self) -> &BTreeSet<IpAddr> {
        &self.addresses
    }

    const fn redirects(&self) -> bool {
        self.redirects.nftables || self.redirects.legacy
    }
}
