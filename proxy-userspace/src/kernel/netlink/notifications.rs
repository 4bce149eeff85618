//! Receives the notifications of netlink's multicast groups.

use std::io;

use netlink_sys::{AsyncSocket as _, AsyncSocketExt as _, Socket, SocketAddr, TokioSocket};
use nix::sys::socket::{setsockopt, sockopt};

use super::{super::KernelError, LARGEST_DATAGRAM};

/// Binds a socket, and joins groups (`NFNLGRP_*`, `RTNLGRP_*`).
pub(in crate::kernel) fn join(socket: &mut Socket, groups: &[u32]) -> io::Result<()> {
    socket.bind(&SocketAddr::new(0, 0))?;
    groups.iter().try_for_each(|group| socket.add_membership(*group))
}

/// A socket that receives all notifications of some groups since it was opened, in the network
/// namespace of the thread that opened it.
pub(in crate::kernel) struct Notifications {
    socket: TokioSocket,
    /// The name of the socket, for errors.
    object: &'static str,
    datagram: Vec<u8>,
}

impl Notifications {
    /// Opens a socket of a protocol, and joins groups (`NFNLGRP_*`, `RTNLGRP_*`).
    pub(in crate::kernel) fn open(
        protocol: isize,
        groups: &[u32],
        object: &'static str,
    ) -> Result<Self, KernelError> {
        let open = || {
            let mut socket = TokioSocket::new(protocol)?;
            join(socket.socket_mut(), groups)?;
            Ok(socket)
        };
        let socket = open().map_err(KernelError::call("open", object))?;
        Ok(Self { socket, object, datagram: Vec::with_capacity(LARGEST_DATAGRAM) })
    }

    /// Makes room for this many bytes of notifications that are not read yet, beyond the limit for
    /// processes without privileges (`net.core.rmem_max`).
    pub(in crate::kernel) fn make_room(&self, bytes: usize) -> Result<(), KernelError> {
        let set = setsockopt(self.socket.socket_ref(), sockopt::RcvBufForce, &bytes);
        set.map_err(io::Error::from).map_err(KernelError::call("enlarge the buffer of", self.object))
    }

    /// Returns the socket, to set options.
    pub(in crate::kernel) const fn socket(&self) -> &TokioSocket {
        &self.socket
    }

    /// Waits for a datagram. Returns `None` if the kernel dropped notifications because the
    /// socket's buffer was full. Dropping the future loses no datagram.
    pub(in crate::kernel) async fn next(&mut self) -> Result<Option<&[u8]>, KernelError> {
        self.datagram.clear();
        match self.socket.recv(&mut self.datagram).await {
            Ok(()) => Ok(Some(&self.datagram)),
            Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => Ok(None),
            Err(error) => Err(KernelError::call("receive from", self.object)(error)),
        }
    }
}
