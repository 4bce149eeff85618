# Creates what kube-proxy 1.36 leaves in ipvs mode for the Services of the small cluster, except
# virtual servers. Runs on its node.
for prefix in KUBE-:inet KUBE-6-:inet6; do
  name=${prefix%:*} family=${prefix#*:}
  table() { echo "create $name$1 $2 family $family hashsize 1024 maxelem 65536"; }
  ports() { echo "create $name$1 bitmap:port range 0-65535"; }
  # A name has at most 31 characters.
  case $family in inet) cidr=LOAD-BALANCER-SOURCE-CIDR sctp=NODE-PORT-LOCAL-SCTP-HASH ;;
  *) cidr=LOAD-BALANCER-SOURCE-CID sctp=NODE-PORT-LOCAL-SCTP-HAS ;; esac
  for set in CLUSTER-IP EXTERNAL-IP EXTERNAL-IP-LOCAL LOAD-BALANCER LOAD-BALANCER-FW LOAD-BALANCER-LOCAL \
    NODE-PORT-SCTP-HASH $sctp; do table $set hash:ip,port; done
  table IPVS-IPS hash:ip
  table $cidr hash:ip,port,net
  table LOAD-BALANCER-SOURCE-IP hash:ip,port,ip
  table LOOP-BACK hash:ip,port,ip
  for set in HEALTH-CHECK-NODE-PORT NODE-PORT-TCP NODE-PORT-UDP NODE-PORT-LOCAL-TCP NODE-PORT-LOCAL-UDP; do ports $set; done
done | ipset restore
ipset restore <<END
add KUBE-CLUSTER-IP 10.96.0.80,6:80
add KUBE-CLUSTER-IP 10.96.0.53,17:53
add KUBE-IPVS-IPS 10.96.0.80
add KUBE-IPVS-IPS 10.96.0.53
add KUBE-LOOP-BACK 10.244.1.11,6:8080,10.244.1.11
add KUBE-LOOP-BACK 10.244.1.12,6:8080,10.244.1.12
add KUBE-LOOP-BACK 10.244.1.11,17:5353,10.244.1.11
add KUBE-LOOP-BACK 10.244.1.12,17:5353,10.244.1.12
add KUBE-NODE-PORT-TCP 30080
END
ip link add kube-ipvs0 type dummy
ip addr add 10.96.0.80/32 dev kube-ipvs0
ip addr add 10.96.0.53/32 dev kube-ipvs0
sysctl -qw net.ipv4.vs.conntrack=1 net.ipv4.vs.expire_nodest_conn=1 net.ipv4.vs.expire_quiescent_template=1 net.ipv4.ip_forward=1

# Arguments: prefix of the sets, loopback, ICMP error, more masquerade rules, rules of cluster IPs,
# and ACCEPT rules for virtual servers.
rules() {
  cat <<END
*filter
:KUBE-FORWARD - [0:0]
:KUBE-IPVS-FILTER - [0:0]
:KUBE-IPVS-OUT-FILTER - [0:0]
:KUBE-NODE-PORT - [0:0]
:KUBE-PROXY-FIREWALL - [0:0]
:KUBE-SOURCE-RANGES-FIREWALL - [0:0]
-A INPUT -m comment --comment "kubernetes ipvs access filter" -j KUBE-IPVS-FILTER
-A INPUT -m comment --comment "kube-proxy firewall rules" -j KUBE-PROXY-FIREWALL
-A INPUT -m comment --comment "kubernetes health check rules" -j KUBE-NODE-PORT
-A FORWARD -m comment --comment "kube-proxy firewall rules" -j KUBE-PROXY-FIREWALL
-A FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD
-A OUTPUT -m comment --comment "kubernetes ipvs access filter" -j KUBE-IPVS-OUT-FILTER
-A KUBE-FORWARD -m comment --comment "kubernetes forwarding rules" -m mark --mark 0x4000/0x4000 -j ACCEPT
-A KUBE-FORWARD -m comment --comment "kubernetes forwarding conntrack rule" -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A KUBE-IPVS-FILTER -m set --match-set $1LOAD-BALANCER dst,dst -j RETURN
-A KUBE-IPVS-FILTER -m set --match-set $1CLUSTER-IP dst,dst -j RETURN
-A KUBE-IPVS-FILTER -m set --match-set $1EXTERNAL-IP dst,dst -j RETURN
-A KUBE-IPVS-FILTER -m set --match-set $1EXTERNAL-IP-LOCAL dst,dst -j RETURN
-A KUBE-IPVS-FILTER -m set --match-set $1HEALTH-CHECK-NODE-PORT dst -j RETURN
-A KUBE-IPVS-FILTER -m conntrack --ctstate NEW -m set --match-set $1IPVS-IPS dst -j REJECT --reject-with $3
-A KUBE-NODE-PORT -m comment --comment "Kubernetes health check node port" -m set --match-set $1HEALTH-CHECK-NODE-PORT dst -j ACCEPT
-A KUBE-SOURCE-RANGES-FIREWALL -j DROP
COMMIT
*nat
:KUBE-LOAD-BALANCER - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-NODE-PORT - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-SERVICES - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A KUBE-LOAD-BALANCER -j KUBE-MARK-MASQ
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
$4
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0
-A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE --random-fully
-A KUBE-SERVICES -s $2 -j RETURN
$5
-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODE-PORT
$6
COMMIT
END
}
rules KUBE- 127.0.0.0/8 icmp-port-unreachable '-A KUBE-NODE-PORT -p tcp -m comment --comment "Kubernetes nodeport TCP port for masquerade purpose" -m set --match-set KUBE-NODE-PORT-TCP dst -j KUBE-MARK-MASQ
-A KUBE-POSTROUTING -m comment --comment "Kubernetes endpoints dst ip:port, source ip for solving hairpin purpose" -m set --match-set KUBE-LOOP-BACK dst,dst,src -j MASQUERADE' \
  '-A KUBE-SERVICES ! -s 10.244.0.0/16 -m comment --comment "Kubernetes service cluster ip + port for masquerade purpose" -m set --match-set KUBE-CLUSTER-IP dst,dst -j KUBE-MARK-MASQ' \
  '-A KUBE-SERVICES -m set --match-set KUBE-CLUSTER-IP dst,dst -j ACCEPT' | iptables-restore --noflush
rules KUBE-6- ::1/128 icmp6-port-unreachable '' '' '' | ip6tables-restore --noflush
