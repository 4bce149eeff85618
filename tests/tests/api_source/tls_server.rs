//! TLS in front of an API server, which can freeze, cut connections and ask for certificates.

use std::{
    io,
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
};

use anyhow::Result;
use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinHandle,
};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{
        RootCertStore, ServerConfig,
        pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
        server::WebPkiClientVerifier,
    },
};

/// The certificate of the server, for `api.test` and 127.0.0.1, and its key.
pub(crate) const CERTIFICATE: &str = include_str!("api.test.pem");
/// The authority of [`CLIENTS`].
const CLIENT_AUTHORITY: &str = include_str!("clients.test.pem");
/// Client certificates, each with its key.
pub(crate) const CLIENTS: [&str; 2] = [include_str!("client-1.test.pem"), include_str!("client-2.test.pem")];

/// A server with TLS. It passes what the connections contain to another server, and stops when it is
/// dropped.
pub(crate) struct TlsServer {
    pub(crate) address: SocketAddr,
    shared: Arc<Shared>,
    serving: JoinHandle<()>,
}

struct Shared {
    server: SocketAddr,
    acceptor: TlsAcceptor,
    /// The client certificate of each connection so far.
    connections: Mutex<Vec<Option<CertificateDer<'static>>>>,
    state: watch::Sender<State>,
}

#[derive(Clone, Copy, Default)]
struct State {
    /// No byte passes.
    is_frozen: bool,
    /// How often all connections were cut.
    cuts: u32,
}

impl TlsServer {
    /// Starts a server that offers these protocols above TLS, and asks for client certificates.
    pub(crate) async fn start(server: SocketAddr, protocols: &[&str]) -> Result<Self> {
        let certificate = CertificateDer::from_pem_slice(CERTIFICATE.as_bytes())?;
        let key = PrivateKeyDer::from_pem_slice(CERTIFICATE.as_bytes())?;
        let mut authorities = RootCertStore::empty();
        authorities.add(CertificateDer::from_pem_slice(CLIENT_AUTHORITY.as_bytes())?)?;
        let clients = WebPkiClientVerifier::builder(Arc::new(authorities)).allow_unauthenticated().build()?;
        let mut config = ServerConfig::builder()
            .with_client_cert_verifier(clients)
            .with_single_cert(vec![certificate], key)?;
        config.alpn_protocols = protocols.iter().map(|name| name.as_bytes().to_vec()).collect();
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let (connections, state) = (Mutex::default(), watch::Sender::default());
        let shared = Arc::new(Shared { server, acceptor, connections, state });
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let serving = tokio::spawn(accept(listener, Arc::clone(&shared)));
        Ok(Self { address, shared, serving })
    }

    pub(crate) fn url(&self) -> String {
        format!("https://{}", self.address)
    }

    /// Returns the number of connections so far.
    pub(crate) fn connections(&self) -> usize {
        self.shared.connections.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Returns which of [`CLIENTS`] each connection came from.
    pub(crate) fn clients(&self) -> Result<Vec<Option<usize>>> {
        let clients = CLIENTS.iter().map(|pem| CertificateDer::from_pem_slice(pem.as_bytes()));
        let clients = clients.collect::<Result<Vec<_>, _>>()?;
        let connections = self.shared.connections.lock().unwrap_or_else(PoisonError::into_inner);
        let client = |peer: &CertificateDer<'_>| clients.iter().position(|client| client == peer);
        Ok(connections.iter().map(|peer| client(peer.as_ref()?)).collect())
    }

    /// Lets no byte pass from now on, as a server that has lost its network.
    pub(crate) fn freeze(&self) {
        self.shared.state.send_modify(|state| state.is_frozen = true);
    }

    /// Breaks all connections.
    pub(crate) fn cut(&self) {
        self.shared.state.send_modify(|state| state.cuts += 1);
    }
}

impl Drop for TlsServer {
    fn drop(&mut self) {
        self.serving.abort();
        self.cut();
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    while let Ok((stream, _)) = listener.accept().await {
        let shared = Arc::clone(&shared);
        tokio::spawn(async move {
            let mut state = shared.state.subscribe();
            let cuts = state.borrow().cuts;
            tokio::select! {
                _ = shared.serve(stream) => {}
                _ = state.wait_for(|state| state.cuts != cuts) => {}
            }
        });
    }
}

impl Shared {
    async fn serve(&self, stream: TcpStream) -> Result<()> {
        let mut state = self.state.subscribe();
        let pass = async {
            let mut client = self.acceptor.accept(stream).await?;
            let peer = client.get_ref().1.peer_certificates().and_then(<[_]>::first).cloned();
            let peer = peer.map(CertificateDer::into_owned);
            self.connections.lock().unwrap_or_else(PoisonError::into_inner).push(peer);
            copy_bidirectional(&mut client, &mut TcpStream::connect(self.server).await?).await?;
            Ok::<(), io::Error>(())
        };
        let frozen = async move { state.wait_for(|state| state.is_frozen).await.map(drop) };
        tokio::pin!(pass);
        tokio::select! {
            biased;
            // The connection stays open, and nothing reads from it.
            Ok(()) = frozen => std::future::pending().await,
            passed = &mut pass => passed?,
        }
        Ok(())
    }
}
